"""The end of a stage: `final/` with a model, tokenizer, manifest and README.md, written whole."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData, metadata_load
from jaxtyping import Float
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import lightning_rlhf
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.evaluation.run_report import leave_report
from lightning_rlhf.io import console, storage
from lightning_rlhf.models import build_roles, checkpoint, heads
from lightning_rlhf.models.config import BASE, REFERENCE, REWARD, SFT
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report import run_page, tables
from lightning_rlhf.runs import folders, measured
from lightning_rlhf.runs.run import Run

LONGEST = 200
"""Number of characters of a cell of a table, at most."""
OPTIONS = {
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
}
"""Kind of quantised weights -> code of the argument with which transformers makes them."""
TEMPLATE = Environment(
    loader=FileSystemLoader(run_page.TEMPLATES), undefined=StrictUndefined, trim_blocks=True
).get_template("card.md.jinja")
"""Template of README.md, the model card."""


def hand_over(
    run: Run, roles: Roles, role: str, metrics: Mapping[str, float], *, head: str | None,
    reward: tuple[float | None, float | None] = (None, None),
    verdicts: Mapping[str, checkpoint.Verdict] | None = None,
    below: Float[Tensor, " V"] | None = None, more: Path | None = None,
) -> Path:  # fmt: skip
    """Write `final/`, or the folder of an export, and return its path.

    reward: mean and standard deviation of a reward model's scores of SFT samples.
    verdicts: as in `Manifest`; head, below, more: as in `write_final`.
    """
    settings, export, folder = run.settings, run.export, run.final
    ending = folders.read_ending(run.folder) if export is None else export.ending
    sft, source = run.parents.get(SFT), settings.model.name_or_path
    base = str(Path(source).resolve()) if source and Path(source).is_dir() else source
    inherited = sft.manifest if sft is not None and sft.is_adapter else None
    outputs, here = settings.outputs.resolve(), folder.resolve()
    parents = {name: str(final.path.resolve()) for name, final in run.parents.items()}
    for name, path in parents.items():  # relative in outputs/, which may be moved
        if Path(path).is_relative_to(outputs) and here.is_relative_to(outputs):
            parents[name] = os.path.relpath(path, here)
    mean, std = reward
    manifest = checkpoint.Manifest(
        stage=settings.stage,
        base=base or checkpoint.FROM_CONFIG,
        base_seed=inherited.base_seed if inherited else settings.seed,
        parents=parents,
        tokenizer_hash=checkpoint.tokenizer_hash(run.tokenizer),
        chat_template=str(run.tokenizer.chat_template),
        reward_mean=mean,
        reward_std=std,
        metrics=dict(metrics) | {"time/stage_s": time.perf_counter() - run.started},
        config=settings.tree,
        versions=checkpoint.versions(),
        verdicts=dict(verdicts or {}),
        chosen={} if ending is None else asdict(ending),
    )
    loaded = roles.causal_lm.name_or_path  # empty for weights of a seed
    stated = license_of(sft.path if sft else None, Path(loaded) if loaded else None)
    of_run, title = None if export else run.folder, folders.run_name(settings)
    kind = settings.definition.data
    write_model(
        folder, roles, role, run.chat, manifest, title=title, kind=kind, license=stated,
        run=of_run, head=head, below=below, more=more,
    )  # fmt: skip
    if export is None:
        leave_report(run.folder, settings.definition)
    done = "finished" if export is None else "exported"
    seconds = run_page.duration(manifest.metrics["time/stage_s"])
    console.print_line(f"{settings.stage} {done} in {seconds}: {folder}", "bold")
    return folder


def write_model(
    folder: Path, roles: Roles, role: str, chat: ChatFormat, manifest: checkpoint.Manifest, *,
    title: str, kind: str, license: Mapping[str, Any], run: Path | None, head: str | None,
    below: Float[Tensor, " V"] | None = None, more: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write a model as `write_final` does, with a README.md of that title.

    `generate` of the saved model stops where the responses were taught to stop.
    kind: section of `data` that the stage was trained on.
    license: keys of the base's license in the metadata of a card; {} where it is not known.
    run: folder of the run with its samples, of which metrics have intervals; None for none.
    head, below, more, dtype: as in `write_final`.
    """
    if (generation := roles.causal_lm.generation_config) is not None:
        generation.eos_token_id = list(chat.end_token_ids)
        generation.pad_token_id = chat.pad_token_id
    is_reward, bias, tokenizer = head == REWARD, 0.0, chat.tokenizer
    if is_reward:
        tokenizer = heads.with_padding(tokenizer, chat.end_token_ids)
        bias = heads.score_bias(roles.heads[REWARD])
    is_adapter = role in roles.adapters(role)
    config, hub = manifest.config, hub_id(manifest.base)
    is_random = manifest.base == checkpoint.FROM_CONFIG
    node = (config.get("data") or {}).get(kind) or {}
    sources = {x: node[x] for x in ("train", "val") if isinstance(node.get(x), str)}
    data = ModelCardData(
        base_model=hub,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["lightning-rlhf", manifest.stage, *(["lora"] if is_adapter else [])],
        datasets=[source for source in sources.values() if hub_id(source)] or None,
        **license,
    )
    seed = f"random weights of seed {manifest.base_seed}"
    origin = {
        "base": seed if is_random else hub or Path(manifest.base).name,
        "license of the base": license.get("license", "not stated with its weights"),
        **{f"from: {name}": source for name, source in manifest.parents.items()},
        **{f"{kind}, {s}": x if hub_id(x) else Path(x).name for s, x in sources.items()},
        "seed": str(config.get("seed")),
    }
    if manifest.chosen:
        origin["step"] = "{step} of {last_step} (final={final})".format(**manifest.chosen)
    kept = (config.get("model") or {}).get("quantization") if is_adapter else None
    card = TEMPLATE.render(
        version=lightning_rlhf.__version__,
        name="path/to/final" if folder.is_absolute() else folder.as_posix(),  # it may be moved
        title=title,
        manifest=manifest,
        metadata=data.to_yaml(),
        origin=tables.table(
            ("", ""), [(key, tables.plain(x, LONGEST)) for key, x in origin.items()], ()
        ),
        metrics=metrics_table(manifest.metrics, run),
        is_reward=is_reward,
        is_adapter=is_adapter,
        is_alone=is_adapter and is_random and SFT not in manifest.parents,
        quantization=OPTIONS.get(str(kept)),
        kwargs="".join(f", {key}={value!r}" for key, value in chat.template_kwargs.items()),
        max_tokens=config.get("data", {}).get("max_response_tokens", 64),
        end=chat.end_token_id,
        mean=repr((manifest.reward_mean or 0.0) - bias),
        std=repr(manifest.reward_std or 1.0),
    )
    with console.Working(f"writing {folder}"):
        write_final(folder, roles, role, tokenizer, manifest, head, below, more, card, dtype)


def write_final(
    folder: Path,
    roles: Roles,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    manifest: checkpoint.Manifest,
    head: str | None,
    below: Float[Tensor, " V"] | None = None,
    more: Path | None = None,
    card: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `role` of `roles` as the folder `folder`, atomically: completely or not at all.

    head: name of the scalar head to save with it; None saves no head.
    below: fingerprint of the model it was trained from, where training has changed that model.
    more: folder of further files to copy into `folder`.
    card: text of README.md; None writes none.
    dtype: data type in which whole weights are stored; None stores them as they are.

    Raises StorageError where the disk is full.
    """
    is_adapter = role in roles.adapters(role)
    parts = roles.model.named_parameters()
    size = sum(part.nbytes for name, part in parts if not is_adapter or f".{role}." in name)
    with storage.written_whole(folder, size, "folder") as temporary:
        own = temporary / checkpoint.ROLES
        own.mkdir(parents=True)
        if more is not None:
            shutil.copytree(more, temporary, dirs_exist_ok=True)
        is_complete = is_adapter and len(roles.adapters(role)) > 1 and head != REWARD
        stands_on = BASE if manifest.stage == "sft" or is_complete else REFERENCE
        below = roles.reference.probe(stands_on) if below is None else below
        fingerprints = {"self": roles.probe(role), "below": below}
        rewards = roles.heads[REWARD] if head == REWARD else None
        if is_adapter:
            sft = manifest.parents.get(SFT)
            parent = base = manifest.base if sft is None else str((folder / sft).resolve())
            with roles.stacked(role) as name:
                if sft is not None and name != role:  # it includes SFT's
                    base = checkpoint.find(parent, SFT).base_folder or manifest.base
                heads.save_adapter(temporary, roles.model, name, base, rewards)
            if rewards is not None:  # PPO stacks it on the SFT adapter, which is loaded already
                heads.save_adapter(own, roles.model, role, parent)
        else:
            causal_lm = roles.causal_lm if dtype is None else roles.causal_lm.to(dtype)
            with roles.weights() as state:
                heads.save_whole(temporary, causal_lm, state, rewards, tokenizer.pad_token_id)
        tokenizer.save_pretrained(temporary)
        if head is not None:
            state = {k: x.cpu().contiguous() for k, x in roles.heads[head].state_dict().items()}
            save_file(state, own / f"{head}_head.safetensors")
        save_file(fingerprints, own / build_roles.FINGERPRINT)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        record = json.dumps(asdict(manifest), indent=2)
        (temporary / checkpoint.MANIFEST).write_text(f"{record}\n")


def metrics_table(metrics: Mapping[str, float], run: Path | None) -> str:
    """Return a table of the metrics of the evaluation, with 95% intervals; "" without any."""
    result = measured.with_intervals(metrics, None)
    with suppress(RLHFError):  # the run keeps no readable samples
        result = measured.with_intervals(metrics, run)
    rows = []
    for name, found in result.items():
        if name.startswith("eval/"):
            interval = "" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
            before = "" if found.before is None else f"{found.before:.4g}"
            rows.append((f"`{name}`", f"{found.value:.4g}", interval, before))
    head = ("on held-out data", "value", "95% interval", "before training")
    return tables.table(head, rows, (1, 2, 3)) if rows else ""


def hub_id(source: str) -> str | None:
    """Return `source` where it can be the id of a repository on the hub, else None."""
    is_id = source.count("/") == 1 and not source.startswith((".", "~", "/")) and ":" not in source
    is_local = Path(source).suffix or checkpoint.is_folder(source)
    return source if is_id and not is_local else None


def license_of(*folders: Path | None) -> dict[str, Any]:
    """Return the license of the first folder whose model card or config.json states one.

    Returns: the keys license, license_name and license_link that are there; {} without any.
    """
    for folder in filter(None, folders):
        for read, name in ((metadata_load, "README.md"), (checkpoint.json_object, "config.json")):
            stated: dict[str, Any] = {}
            with suppress(OSError, ValueError, yaml.YAMLError, RLHFError):
                stated = read(folder / name) or {}
            if isinstance(stated.get("license"), str):
                keys = ("license", "license_name", "license_link")
                return {key: str(stated[key]) for key in keys if key in stated}
    return {}
