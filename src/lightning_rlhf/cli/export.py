"""Commands on a finished model: lightning-rlhf export, and serve-reward.

`export` writes a folder like `final/` from a kept checkpoint, or one with whole weights.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
from pydantic import Field

from lightning_rlhf.callbacks.files import step_named, step_of
from lightning_rlhf.core.config import DType
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.core.validation import PositiveInt, check_value
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.evaluation.build_rewards import text_scorer
from lightning_rlhf.evaluation.select import export_of
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.user_code import code_of_command, nearest_path
from lightning_rlhf.kernels.patch import rounding_of, same_logits
from lightning_rlhf.models.build_roles import REROUNDED, fingerprint, load_head, whole_weights
from lightning_rlhf.models.checkpoint import (
    MANIFEST,
    Final,
    check_weights,
    config_faults,
    find,
    is_folder,
)
from lightning_rlhf.models.config import POLICY, REWARD, SFT, ModelConfig
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.config import token_in
from lightning_rlhf.runs.console import quiet_libraries
from lightning_rlhf.runs.folders import CONFIG, FINAL, read_config, run_folder
from lightning_rlhf.runs.parents import trained_as
from lightning_rlhf.runs.resume import is_stale, saved
from lightning_rlhf.runs.settings import read_tree
from lightning_rlhf.runs.stage import Settings, TrainerConfig, find_stage, stage_names
from lightning_rlhf.stages import fit
from lightning_rlhf.stages.model_card import license_of, write_model

if TYPE_CHECKING:  # its imports are in the extra "serve"
    from lightning_rlhf.rewards.server import RewardServer


def export_model(arguments: Sequence[str]) -> None:
    """Export a checkpoint, or merge a model."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf export",
        description="Write the model of a kept checkpoint of a run as a folder like final/, with "
        "its tokenizer and manifest; or that of a final/ folder as whole weights, adapters merged.",
    )
    parser.add_argument(
        "run", metavar="FOLDER",
        help="with --step the folder of the run, as outputs/<run>/<model>/ppo; with --merge a "
        "final/ folder or hub id",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--step", type=int, metavar="N", help="which: an iteration of PPO, or an optimizer step"
    )
    what.add_argument(
        "--merge", action="store_true",
        help="merge the adapter into the weights that it is applied to",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=get_args(DType), help="data type of merged weights (float32)"
    )
    parser.add_argument(
        "--out", metavar="DIR",
        help="folder to write (final_<step> in the folder of the run; <name>_merged beside final/)",
    )  # fmt: skip
    parser.add_argument(
        "--code", action="append", default=[], metavar="FILE.py:NAME",
        help="stage or sampler of your own that the run used; what its folder names is not run",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run code that comes with the model where the folder's configuration asks for it; "
        "without this such a folder is refused",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    out = None if given.out is None else Path(given.out)
    what_for = "--step N for the model of a checkpoint, or --merge for that of a final/ folder"
    require(given.merge or given.step is not None, "export", None, what_for)
    require(given.merge or given.dtype is None, "--dtype", given.dtype, "none without --merge")
    with code_of_command(given.code):
        if given.merge:
            merge_final(given.run, out, given.dtype or "float32", given.trust_remote_code)
        else:
            check_value("--step", given.step, PositiveInt)
            export_run(Path(given.run), given.step, out, given.trust_remote_code)


def export_run(folder: Path, step: int, out: Path | None, trust_remote_code: bool) -> None:
    """Write the model of a step of the run in `folder`.

    out: folder to write; None is `final_<step>` in the folder of the run.

    Raises:
        ConfigError: the folder holds no run of a stage that can be exported, or `out` exists.
        CheckpointError: there is no checkpoint of the step, or it is damaged or of another run.
    """
    settings = settings_of(folder, trust_remote_code=trust_remote_code)
    if not settings.definition.trains:
        raise ConfigError(f"{folder} is a run of stage={settings.stage}, which exports none")
    kept = {step_named(p) if p.stem.isdigit() else step_of(p): p for p in saved(folder)}
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept))) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; kept are: {steps}")
    out = folder / f"{FINAL}_{step:06d}" if out is None else out
    refuse_existing(out)
    if is_stale(settings):
        raise CheckpointError(
            f"{folder} cannot be exported: the models that it was started from are others now"
        )
    fit.export(settings, export_of(folder, settings, kept[step], step, out))


@code_of_command()
def settings_of(folder: Path, *, trust_remote_code: bool = False) -> Settings:
    """Return the settings of the run in `folder`; earlier stages are looked for beside it.

    trust_remote_code: whether code that models bring may be executed. Other code that the run's
    configuration names is not: see `code_of_command`.
    Raises ConfigError where there is no training run, or one with code that may not be executed;
    CheckpointError where its file is damaged.
    """
    file = folder / CONFIG
    if not file.is_file():
        found = f"is no run: it has no {CONFIG}" if folder.is_dir() else "does not exist"
        beside = sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))
        runs = f"; runs beside it: {', '.join(beside)}" if beside else nearest_path(str(folder))
        raise ConfigError(
            f"{folder} {found}; allowed: the folder of a run of stage=ppo, sft or rm, as "
            f"outputs/<run>/<model>/ppo{runs}"
        )
    tree = read_config(file, "export has to know the configuration of the run")
    if "stage" not in tree or tree["stage"] not in stage_names(tree):
        raise CheckpointError(f"{file} is damaged: it names no stage")
    if not trust_remote_code:
        refuse_code(tree, file)
    stage = tree["stage"]
    if stage not in tree:
        raise CheckpointError(f"{file} is damaged: it lacks {stage}")
    # Nothing is logged, so that no logger asks for a key.
    unread: dict[str, Any] = {"logger": {"kind": "csv"}, "callbacks": {}}
    if isinstance(tree.get("trainer"), dict):
        ours = TrainerConfig.__dataclass_fields__
        unread["trainer"] = {
            key: value for key, value in tree["trainer"].items()
            if key in ours or isinstance(value, int | None) or value == "lightning.Trainer"
        }  # fmt: skip
    try:
        settings = read_tree(tree | unread)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    parts = folder.resolve().parts
    own = run_folder(Path(), settings.run, settings.model.name, settings.stage, settings.job).parts
    if parts[-len(own) :] != own:  # the folder was moved: its parents are where the run found them
        return settings
    return replace(settings, outputs=Path(*parts[: -len(own)]))


def refuse_code(tree: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError where the configuration of a run asks for code that a model brings."""

    def trusting(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from trusting(value, f"{prefix}{key}.")
            elif key == "trust_remote_code" and value is not False:
                yield f"{prefix}{key}", value

    asks = [(key, value) for key, value, _ in config_faults(tree) if "attn_implementation" in key]
    for key, value in [*trusting(tree, ""), *asks]:
        raise ConfigError(
            f"{file} asks for code that a model brings: {key} is {value!r}. It runs with "
            "--trust-remote-code alone, which is for folders that you trust"
        )


def checked_final(source: str, *, trusted: bool) -> Final:
    """Return a model that a stage has written, in a `final/` folder or as a hub id.

    trusted: whether code that comes with the model may run.

    Raises CheckpointError where it is damaged or not of a stage, ConfigError for untrusted code.
    """
    final = find(source, "FINAL")
    check_weights(final.adapter)
    if final.manifest is None:
        raise CheckpointError(f"{final.path} has no {MANIFEST}; allowed: the final/ of a run")
    if not trusted:
        refuse_code(final.manifest.config, final.path / MANIFEST)
    return final


def refuse_existing(out: Path) -> None:
    """Raise ConfigError where the folder to write exists."""
    if os.path.lexists(out):
        raise ConfigError(f"--out {out} exists already; allowed: a folder that does not")


@torch.no_grad()
def merge_final(source: str, out: Path | None, dtype: DType, trusted: bool) -> None:
    """Write the model of a `final/` folder or hub id as whole weights, without adapters.

    Adapters are merged in float32. A multimodal base is written as its language model.

    out: folder to write; None is `<name>_merged` beside the folder.
    dtype: data type of the written weights.
    trusted: True if code that comes with the model may run.

    Raises ConfigError where `out` exists, and CheckpointError where the folder holds no model of a
    stage, or other weights than the stage wrote.
    """
    final = checked_final(source, trusted=trusted)
    if out is None:
        require(is_folder(source), "--out", None, "a folder to write, for a model of the hub")
        here = final.path if final.path.name not in ("", "..") else final.path.resolve()
        out = here.with_name(f"{here.name}_merged")
    refuse_existing(out)
    quiet_libraries()
    trained, template_kwargs = trained_as(final)
    assert final.manifest is not None
    is_reward = final.manifest.stage == "rm"
    with Working("loading the model"):
        roles = merged(final, trained)
    role = REWARD if is_reward else POLICY
    roles.assign(role)
    tokenizer = load_tokenizer(trained, final.path)
    chat = ChatFormat(tokenizer, template_kwargs)
    if is_reward:
        roles.heads[REWARD] = load_head(final, REWARD, roles.hidden_size)
    stored = getattr(torch, dtype)
    for parameter in roles.causal_lm.parameters():  # the fingerprint is that of rounded weights
        parameter.copy_(parameter.to(stored))
    beside = out.resolve().parent == final.path.resolve().parent
    parents = {
        name: source if beside else str((final.path / source).resolve())
        for name, source in final.manifest.parents.items()
    }
    manifest = replace(final.manifest, parents=parents)
    write_model(
        out, roles, role, tokenizer, chat, manifest, f"{manifest.stage}, merged",
        "prompts" if (stage := find_stage(manifest.stage)) is None else stage.data,
        head=REWARD if is_reward else None,
        license=license_of(final.path),
        run=final.path.parent if final.path.name == FINAL else None,
        below=fingerprint(final, "below"),
        dtype=stored,
    )  # fmt: skip
    print_line(f"merged, {dtype}: {out}")


def merged(final: Final, trained: ModelConfig) -> Roles:
    """Return the model of `final` in float32 with its adapters merged into plain weights.

    Quantised weights are those values to which they were rounded in training.

    Raises CheckpointError where its logits are not those in the fingerprint of `final`.
    """
    assert final.manifest is not None
    quantised = trained.quantization != "none"  # from numbers of the type that was rounded then
    config = replace(
        trained, dtype=trained.dtype if quantised else "float32", kernels="plain",
        gradient_checkpointing=False,
    )  # fmt: skip
    sft: Final | None = final
    reward: Final | None = None
    if final.manifest.stage == "rm":
        parent, reward = final.parent(SFT), final
        sft = None if parent is None else find(str(parent), f"the SFT model of {final.path}")
    model = whole_weights(config, sft, reward, final.manifest.base_seed)
    roles = Roles(model.requires_grad_(False), "plain")
    expected = fingerprint(final, "self")
    layers = model.config.get_text_config().num_hidden_layers
    limit = max(
        rounding_of(getattr(torch, trained.dtype), layers), REROUNDED.get(trained.quantization, 0)
    )
    if expected is not None and not same_logits(roles.probe(roles.role), expected, limit):
        raise CheckpointError(
            f"{final.path} cannot be merged: with the base weights that are here it gives other "
            "logits than it gave"
        )
    return roles


def serve_reward(arguments: Sequence[str]) -> None:
    """Serve a reward model behind HTTP until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: an argument is wrong, or the libraries of the server are not installed.
        CheckpointError: there is no such model.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf serve-reward",
        description="Serve a reward model over HTTP, for stage=ppo reward=http elsewhere. It takes "
        "the extra serve: pip install 'lightning-rlhf[serve]'.",
        epilog='POST /score takes {"prompts": [[{"role", "content"}, ...], ...], "responses": '
        '[...]} and answers {"scores": [...]}; GET /health answers {"status": "ok"}, without a '
        "token too. The traffic is not encrypted.",
    )
    parser.add_argument(
        "final", help="final/ folder of stage=rm or sequence classifier, or the hub id of one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="reward.KEY=VALUE",
        help="as for reward=model, e.g. reward.batch_size=64 reward.chat_template=pair",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen at (%(default)s); 0.0.0.0 or :: lets other machines in",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0 = any free one")
    parser.add_argument(
        "--token-env", metavar="NAME",
        help="environment variable with a token, without which nobody gets scores; "
        "reward.token_env is its like in the run that asks",
    )  # fmt: skip
    given = parser.parse_intermixed_args(arguments)
    server = None
    # uvicorn raises the signal that ended it once more.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = reward_server(given)
        is_ipv6, token_env = ":" in server.host, given.token_env
        url = f"'reward.url=\"{server.url}\"'" if is_ipv6 else f"reward.url={server.url}"
        token = f" reward.token_env={token_env}" if token_env else ""
        print(f"reward server: use it with reward=http {url}{token}; Ctrl-C ends it", flush=True)
        if server.is_open:
            who = (
                "has the token"
                if token_env
                else "can reach the port, since there is no --token-env"
            )
            print(f"it listens at {server.host}, to other machines too: it answers whoever {who}",
                  flush=True)  # fmt: skip
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    print("stopped", flush=True)
    if server is not None and server.is_scoring:
        os._exit(0)  # Python would wait for the thread, which may never return


def reward_server(given: argparse.Namespace) -> RewardServer:
    """Return the server of the command line, with its address bound and its model loaded."""
    try:
        from lightning_rlhf.rewards.server import RewardServer, listening_socket
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve-reward needs {error.name}: pip install 'lightning-rlhf[serve]'"
        ) from error
    check_value("--port", given.port, Annotated[int, Field(ge=0, le=65535)])
    token = None if given.token_env is None else token_in(given.token_env, "--token-env")
    address = listening_socket(given.host, given.port)
    quiet_libraries()
    return RewardServer(text_scorer(given.final, given.overrides), address, token=token)
