"""Commands on what is there: pages of runs, exports of models, serve-reward, a W&B workspace."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
from pydantic import Field
from rich import get_console
from rich.tree import Tree

from lightning_rlhf.callbacks import files, loggers
from lightning_rlhf.cli.arguments import FLAG, Options, parse_command
from lightning_rlhf.core import metrics, validation
from lightning_rlhf.core.config import DType
from lightning_rlhf.core.errors import CheckpointError, ConfigError, require
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.evaluation import build_rewards, select
from lightning_rlhf.evaluation.compare import compare_runs, write_report
from lightning_rlhf.evaluation.diminishing import measure_run
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.io.storage import refuse_foreign, written_whole
from lightning_rlhf.io.user_code import code_of_command, nearest_path, optional
from lightning_rlhf.kernels.patch import rounding_of, same_logits
from lightning_rlhf.models import build_roles, checkpoint, loading
from lightning_rlhf.models.config import POLICY, REWARD, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rewards.config import token_in
from lightning_rlhf.runs import accelerator, folders, resume
from lightning_rlhf.runs.settings import read_tree
from lightning_rlhf.runs.stage import Settings, TrainerConfig, find_stage, stage_names
from lightning_rlhf.stages import fit
from lightning_rlhf.stages.final import license_of, write_model

COMPARE: Options = {
    "runs": {"nargs": "+", "metavar": "RUN", "help": "folder of a run, or one above runs"},
    "--stage": {"help": "which runs to take, where there are several stages (ppo)"},
    "--out": {"default": "compare.html", "help": "the page (%(default)s)"},
}
"""Arguments of compare, as below those of other commands."""
REPEATED = {"action": "append", "default": []}
"""Keywords of an option that may be given several times."""
EXPORT: Options = {
    "run": {"metavar": "FOLDER", "help": "of a run, with --step; a final/ or hub id, with --merge"},
    "--step": {"type": int, "metavar": "N", "help": "an iteration of PPO or an optimizer step"},
    "--merge": FLAG | {"help": "merge the adapter into the weights that it is applied to"},
    "--dtype": {"choices": get_args(DType), "help": "data type of merged weights (float32)"},
    "--out": {"metavar": "DIR", "help": "folder to write (final_<step>, or <name>_merged beside)"},
    "--code": REPEATED | {"metavar": "FILE.py:NAME", "help": "own stage or sampler of the run"},
    "--trust-remote-code": FLAG | {"help": "run code that a model brings, where it asks for it"},
}
SERVE: Options = {
    "final": {"help": "final/ folder of stage=rm or sequence classifier, or a hub id of one"},
    "overrides": {"nargs": "*", "metavar": "reward.KEY=VALUE", "help": "as for reward=model"},
    "--host": {"default": "127.0.0.1", "help": "%(default)s; 0.0.0.0 or :: lets other machines in"},
    "--port": {"type": int, "default": 8000, "help": "%(default)s; 0 = any free one"},
    "--token-env": {"metavar": "NAME", "help": "variable with the token that clients must send"},
}
PROTOCOL = """POST /score takes {"prompts": [[{"role", "content"}, ...], ...], "responses": [...]}
and answers {"scores": [...]}; GET /health answers {"status": "ok"}, without a token too. The
traffic is not encrypted."""
"""Description of the protocol, in the help of serve-reward."""
SWEPT = ("ppo.kl_coef", "ppo.lr", "seed")
"""Configuration keys on the axes of the parallel coordinates, unless others are given."""
DASHBOARD: Options = {
    "project": {"metavar": "ENTITY/PROJECT", "help": "where runs with logger=wandb are"},
    "--name": {"default": "lightning-rlhf", "help": "name of the workspace"},
    "--sweep": {"nargs": "+", "metavar": "KEY", "default": SWEPT, "help": "keys of the axes"},
    "--dry-run": FLAG | {"help": "print the panels, save nothing"},
}


def report(arguments: Sequence[str]) -> None:
    """Write report.html, one page with verdict, curves, evaluation, samples and configuration, into
    the folder of a run, as the run itself does at its end; or about all stages into the folder
    above, as a recipe does."""
    place = {"help": "outputs/<run>/<model>/<stage>, or outputs/<run>/<model>"}
    given = parse_command(report, arguments, {"run": place})
    print_line(f"report: {write_report(Path(given.run))}")


def diminishing(arguments: Sequence[str]) -> None:
    """Find the iteration of a run of stage=ppo after which more compute added next to nothing,
    from its metrics.csv. Writes diminishing.json and diminishing.png into its folder, as the run
    itself does at its end."""
    place = {"help": "folder of the run, as outputs/<run>/<model>/ppo"}
    measure_run(Path(parse_command(diminishing, arguments, {"run": place}).run))


def compare(arguments: Sequence[str]) -> None:
    """Compare runs of a stage: means with intervals over seeds, overlaid curves, rewards at equal
    KL, and what differs in configuration. Runs that differ in their seed alone are one group."""
    given = parse_command(compare, arguments, COMPARE)
    out = Path(given.out)
    refuse_foreign(out, "page")
    found = compare_runs([Path(run) for run in given.runs], given.stage, minimum=2)
    for table in found.console():
        get_console().print(table)
    with written_whole(out, kind="page") as temporary:
        found.write(temporary, f"{found.stage}: {', '.join(given.runs)}")
    print_line(f"comparison: {out}")


def export(arguments: Sequence[str]) -> None:
    """Write the model of a kept checkpoint of a run as a folder like final/, with its tokenizer and
    manifest; or that of a final/ folder as whole weights, adapters merged.

    Raises:
        ConfigError: the folder holds no run of a stage that can be exported, or --out exists.
        CheckpointError: there is no checkpoint of the step, or it is damaged or of another run.
    """
    given = parse_command(export, arguments, EXPORT)
    out, step, folder = None if given.out is None else Path(given.out), given.step, Path(given.run)
    choice = "either --step N for the model of a checkpoint, or --merge for that of a final/ folder"
    require(given.merge != (step is not None), "export", step, choice)
    require(given.merge or given.dtype is None, "--dtype", given.dtype, "none without --merge")
    with code_of_command(given.code):
        if given.merge:
            merge_final(given.run, out, given.dtype or "float32", given.trust_remote_code)
            return
        validation.check_value("--step", step, validation.PositiveInt)
        settings = settings_of(folder, trust_remote_code=given.trust_remote_code)
        fit.require_trained(settings.definition, "exported")
        kept = {
            int(p.stem) if p.stem.isdigit() else files.step_of(p): p for p in resume.saved(folder)
        }
        out = out or folder / f"{folders.FINAL}_{step:06d}"
        require(not os.path.lexists(out), "--out", str(out), "a folder that does not exist")
        if step not in kept:
            steps = ", ".join(map(str, sorted(kept)))
            raise CheckpointError(f"{folder} has no checkpoint of step {step}; kept are: {steps}")
        if resume.is_stale(settings):
            reason = "the models that it was started from are others now"
            raise CheckpointError(f"{folder} cannot be exported: {reason}")
        fit.export(settings, select.export_of(folder, settings, kept[step], step, out))


@code_of_command()
def settings_of(folder: Path, *, trust_remote_code: bool = False) -> Settings:
    """Return the settings of the run in `folder`; earlier stages are looked for beside it.

    trust_remote_code: whether code that models bring may be executed. Other code that the run's
    configuration names is not: see `code_of_command`.
    Raises ConfigError where there is no training run, or one with code that may not be executed;
    CheckpointError where its file is damaged.
    """
    file = folder / folders.CONFIG
    if not file.is_file():
        raise ConfigError(
            f"{folder} is no run: it has no {folders.CONFIG}; allowed: the folder of a run of "
            f"stage=ppo, sft or rm, as outputs/<run>/<model>/ppo{nearest_path(str(folder))}"
        )
    tree = folders.read_config(file, "export has to know the configuration of the run")
    if tree.get("stage") not in stage_names(tree) or tree["stage"] not in tree:
        raise CheckpointError(f"{file} is damaged: it names no stage, or lacks its section")
    if not trust_remote_code:
        refuse_code(tree, file)
    # Nothing is logged, so that no logger asks for a key, and no object of a Trainer is made.
    unread: dict[str, Any] = {"logger": {"kind": "csv"}, "callbacks": {}, "optimizer": {}}
    try:
        plain = tree["trainer"].keys() & TrainerConfig.__dataclass_fields__
        trainer = {key: tree["trainer"][key] for key in plain}
        unread["trainer"] = trainer | {"_target_": "lightning.Trainer"}
        settings = replace(read_tree(tree | unread), tree=tree)  # which goes into the manifest
    except (ConfigError, LookupError, AttributeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    own, place = Path(folders.run_name(settings)).parts, folder.resolve()
    if place.parts[-len(own) :] != own:  # it was moved: its parents are where the run found them
        return settings
    return replace(settings, outputs=place.parents[len(own) - 1])


def code_asked_by(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and value of each trust_remote_code in a section that is not false."""
    for name, value in section.items():
        if name == "trust_remote_code" and value is not False:
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from code_asked_by(value, f"{prefix}{name}.")


def refuse_code(tree: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError where the configuration of a run asks for code that a model brings."""
    faults = checkpoint.config_faults(tree)
    asks = [(key, value) for key, value, _ in faults if "attn_implementation" in key]
    for key, value in [*asks, *code_asked_by(tree)]:
        raise ConfigError(
            f"{file} asks for code that a model brings: {key} is {value!r}. It runs with "
            "--trust-remote-code alone, which is for folders that you trust"
        )


def checked_final(source: str, *, trusted: bool) -> checkpoint.Final:
    """Return a model that a stage has written, in a `final/` folder or as a hub id.

    trusted: whether code that comes with the model may run.

    Raises CheckpointError where it is damaged or not of a stage, ConfigError for untrusted code.
    """
    final = checkpoint.find(source, "FINAL")
    checkpoint.check_weights(final.adapter)
    if final.manifest is None:
        raise CheckpointError(f"{final.path} has no manifest.json; allowed: the final/ of a run")
    if not trusted:
        refuse_code(final.manifest.config, final.path / checkpoint.MANIFEST)
    return final


@torch.no_grad()
def merge_final(source: str, out: Path | None, dtype: DType, trusted: bool) -> None:
    """Write the model of a `final/` folder or hub id as whole weights, without adapters.

    Adapters are merged in float32, into quantised weights as they were rounded in training. A
    multimodal base is written as its language model.

    out: folder to write; None is `<name>_merged` beside the folder.
    dtype: data type of the written weights.
    trusted: True if code that comes with the model may run.

    Raises ConfigError where `out` exists, and CheckpointError where the folder holds no model of a
    stage, or other weights than the stage wrote.
    """
    final = checked_final(source, trusted=trusted)
    manifest, here = final.manifest, final.path.resolve()
    assert manifest is not None
    require(out is not None or os.path.isdir(source), "--out", None, "a folder, for a hub id")
    out = out or here.parent / f"{here.name}_merged"
    require(not os.path.lexists(out), "--out", str(out), "a folder that does not exist")
    accelerator.quiet_libraries()
    trained, template_kwargs = folders.trained_as(final)
    config = replace(trained, kernels="plain", gradient_checkpointing=False)
    if trained.quantization == "none":  # else from numbers of the type that was rounded then
        config = replace(config, dtype="float32")
    head = REWARD if manifest.stage == "rm" else None
    parent = final.parent(SFT) if head else final.path
    sft = None if parent is None else checkpoint.find(str(parent), f"the SFT model of {final.path}")
    with Working("loading the model"):
        model = build_roles.whole_weights(config, sft, final if head else None, manifest.base_seed)
    roles = Roles(model.requires_grad_(False), "plain")
    expected = build_roles.fingerprint(final, "self")
    layers = model.config.get_text_config().num_hidden_layers
    requantised = build_roles.REROUNDED.get(trained.quantization, 0)
    limit = max(rounding_of(getattr(torch, trained.dtype), layers), requantised)
    if expected is not None and not same_logits(roles.probe(roles.role), expected, limit):
        raise CheckpointError(
            f"{final.path} cannot be merged: with the base weights that are here it gives other "
            "logits than it gave"
        )
    roles.assign(head or POLICY)
    if head is not None:
        roles.heads[head] = build_roles.load_head(final, head, roles.hidden_size)
    stored, tokenizer = getattr(torch, dtype), loading.load_tokenizer(trained, final.path)
    for parameter in roles.causal_lm.parameters():  # the fingerprint is that of rounded weights
        parameter.copy_(parameter.to(stored))
    if out.resolve().parent != here.parent:
        parents = {name: str((here / path).resolve()) for name, path in manifest.parents.items()}
        manifest = replace(manifest, parents=parents)
    stage = find_stage(manifest.stage)
    write_model(
        folder=out,
        roles=roles,
        role=head or POLICY,
        chat=ChatFormat(tokenizer, template_kwargs),
        manifest=manifest,
        title=f"{manifest.stage}, merged",
        kind="prompts" if stage is None else stage.data,
        license=license_of(final.path),
        run=here.parent if here.name == folders.FINAL else None,
        head=head,
        below=build_roles.fingerprint(final, "below"),
        dtype=stored,
    )
    print_line(f"merged, {dtype}: {out}")


def serve_reward(arguments: Sequence[str]) -> None:
    """Serve a reward model over HTTP, for stage=ppo reward=http elsewhere, until Ctrl-C or SIGTERM.
    It takes the extra serve: pip install 'lightning-rlhf[serve]'.

    Raises:
        ConfigError: an argument is wrong, or the libraries of the server are not installed.
        CheckpointError: there is no such model.
    """
    given = parse_command(serve_reward, arguments, SERVE, PROTOCOL)
    for library in ("starlette", "uvicorn"):
        optional(library, "serve", "serve-reward")
    from lightning_rlhf.rewards.server import RewardServer, listening_socket

    validation.check_value("--port", given.port, Annotated[int, Field(ge=0, le=65535)])
    token = None if given.token_env is None else token_in(given.token_env, "--token-env")
    server = None
    # uvicorn raises the signal that ended it once more.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        address = listening_socket(given.host, given.port)
        accelerator.quiet_libraries()
        scorer = build_rewards.text_scorer(given.final, given.overrides)
        server = RewardServer(scorer, address, token=token)
        key = f" reward.token_env={given.token_env}" if token else ""
        use = f"reward=http 'reward.url=\"{server.url}\"'{key}"
        print(f"reward server: use it with {use}; Ctrl-C ends it", flush=True)
        if server.is_open:
            who = "has the token" if token else "can reach the port: there is no --token-env"
            print(f"other machines reach {server.host} too: it answers whoever {who}", flush=True)
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    print("stopped", flush=True)
    if server is not None and server.is_scoring:
        os._exit(0)  # Python would wait for the thread, which may never return


SECTIONS: dict[str, tuple[str, Sequence[metrics.Phase]]] = {
    "Rollout": ("ppo", ["rollout"]),
    "Update": ("ppo", ["update"]),
    "Evaluation": ("ppo", ["eval"]),
    "Time": ("ppo", ["time"]),
    "Compute": ("ppo", ["compute"]),
    "SFT": ("sft", ["update", "eval", "compute"]),
    "Reward model": ("rm", ["update", "eval", "compute"]),
    "DPO": ("dpo", ["update", "eval", "compute"]),
    "Ranked responses": ("rank", ["rank", "eval"]),
    "Evaluation of policies": ("eval_policy", ["eval"]),
}
"""Title of a section -> the stage and the phases whose metrics it shows."""


def dashboard(arguments: Sequence[str]) -> None:
    """Make a workspace in a W&B project: headline metrics, rollout, update, evaluation, time,
    samples, reward against KL over runs, and parallel coordinates for sweeps. It takes the extra
    dashboard: pip install 'lightning-rlhf[dashboard]'."""
    given = parse_command(dashboard, arguments, DASHBOARD)
    entity, _, project = given.project.partition("/")
    is_project = bool(entity and project) and "/" not in project
    require(is_project, "PROJECT", given.project, "ENTITY/PROJECT, as in wandb.ai/ENTITY/PROJECT")
    optional("wandb_workspaces", "dashboard", "dashboard")
    workspace = build_workspace(entity, project, given.name, given.sweep)
    if given.dry_run:
        tree = Tree(f"{given.project}: {given.name}")
        for section in workspace.sections:
            branch = tree.add(section.name)
            for panel in section.panels:
                branch.add(str(getattr(panel, "title", None) or getattr(panel, "table_name", "")))
        get_console().print(tree)
        return
    import requests
    import wandb

    try:
        workspace.save()  # which prints its address
    except (wandb.errors.Error, requests.RequestException, ValueError) as error:
        raise ConfigError(f"W&B did not save the workspace in {given.project}: {error}") from error


def build_workspace(entity: str, project: str, name: str, swept: Sequence[str]) -> Any:
    """Return the `Workspace`, not saved yet; nothing is asked of a server.

    swept: configuration keys on the axes of the parallel coordinates.
    """
    from wandb_workspaces.reports import v2 as panels
    from wandb_workspaces.workspaces import Section, Workspace, WorkspaceSettings

    def line(name: str) -> Any:
        """Return the panel of a metric over iterations; of NAME<part>, all of its parts."""
        prefix, is_family, _ = name.partition("<")
        if is_family:
            return panels.LinePlot(title=name, x=loggers.AXIS, metric_regex=f"^{prefix}.*")
        return panels.LinePlot(
            title=name, x=loggers.AXIS, y=[name], title_y=metrics.METRICS[name].unit
        )

    x, y = panels.SummaryMetric(metrics.KL), panels.SummaryMetric(metrics.REWARD)
    axes: list[Any] = [*map(panels.Config, swept), x, y]
    columns = [panels.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes]
    against = panels.ScatterPlot(title="reward against KL", x=x, y=y)
    runs = panels.ParallelCoordinatesPlot(title="runs of a sweep", columns=columns)
    headlines = [line(name) for name in metrics.HEADLINES]
    opened: dict[str, list[Any]] = {"Headline": headlines, "Runs compared": [against, runs]}
    rest = {name: x for name, x in metrics.METRICS.items() if name not in metrics.HEADLINES}
    sections = opened | {
        title: [line(n) for n, x in rest.items() if stage in x.stages and x.phase in phases]
        for title, (stage, phases) in SECTIONS.items()
    }
    sections["Samples"] = [panels.WeavePanelSummaryTable(table_name="samples")]
    shown = [Section(name=x, panels=sections[x], is_open=x in opened) for x in sections]
    settings = WorkspaceSettings(x_axis=loggers.AXIS, smoothing_type="none")
    return Workspace(entity=entity, project=project, name=name, settings=settings, sections=shown)
