"""The end of a stage: `final/` with the model, its tokenizer, its manifest and README.md."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData, metadata_load
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from peft import PeftModel

import lightning_rlhf
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.data.formats import Kind
from lightning_rlhf.evaluation.run_report import leave_report
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.models.checkpoint import (
    FROM_CONFIG,
    Manifest,
    Verdict,
    is_folder,
    json_object,
    stands_on_random_weights,
    tokenizer_hash,
    versions,
)
from lightning_rlhf.models.config import REWARD, SFT
from lightning_rlhf.models.export import write_final
from lightning_rlhf.models.heads import score_bias, with_padding
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.report.run_page import TEMPLATES
from lightning_rlhf.report.tables import plain, table
from lightning_rlhf.runs.changes import read_ending
from lightning_rlhf.runs.folders import FINAL, run_name
from lightning_rlhf.runs.measured import StageResult
from lightning_rlhf.runs.run import Run

CARD = "README.md"
LONGEST = 200
"""Number of characters of a cell of a table, at most."""
OPTIONS = {
    "int8": "BitsAndBytesConfig(load_in_8bit=True)",
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
}
"""Kind of quantised weights -> code of the argument with which transformers makes them."""


def model_card(
    folder: Path,
    title: str,
    manifest: Manifest,
    kind: Kind,
    chat: ChatFormat,
    *,
    is_adapter: bool,
    reward_bias: float | None,
    license: Mapping[str, Any],
    run: Path | None,
) -> str:
    """Return the model card of a `final/` folder as Markdown with its metadata.

    folder: what the code that loads the model names.
    manifest: manifest in the same folder.
    kind: section of `data` that the stage was trained on.
    is_adapter: True if the folder holds an adapter, False if it holds whole weights.
    reward_bias: constant by which the reward is larger than the classifier's score; None for a
        policy.
    license: keys of the base's license in the metadata of a card; {} where it is not known.
    run: folder of the run with its samples, of which metrics have intervals; None for none.
    """
    config, is_reward, hub = manifest.config, reward_bias is not None, hub_id(manifest.base)
    node = (config.get("data") or {}).get(kind) or {}
    found = {split: node.get(split) for split in ("train", "val")}
    sources = {split: source for split, source in found.items() if isinstance(source, str)}
    data = ModelCardData(
        base_model=hub,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["lightning-rlhf", manifest.stage, *(["lora"] if is_adapter else [])],
        datasets=[source for source in sources.values() if hub_id(source)] or None,
        **license,
    )
    is_random = manifest.base == FROM_CONFIG
    seed, chosen = f"random weights of seed {manifest.base_seed}", manifest.chosen
    origin = {
        "base": seed if is_random else hub or Path(manifest.base).name,
        "license of the base": license.get("license", "not stated with its weights"),
        **{f"from: {role}": source for role, source in manifest.parents.items()},
        **{f"{kind}, {s}": x if hub_id(x) else Path(x).name for s, x in sources.items()},
        **({"step": "{step} of {last_step} (final={final})".format(**chosen)} if chosen else {}),
        "seed": str(config.get("seed")),
    }
    model, quantization = config.get("model") or {}, ""
    if is_adapter and model.get("quantization", "none") != "none":
        option = OPTIONS[model["quantization"]]
        quantization = f",\n    dtype={model['dtype']!r},\n    quantization_config={option},\n"
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True)  # fmt: skip
    return jinja.get_template("card.md.jinja").render(
        version=lightning_rlhf.__version__,
        name="path/to/final" if folder.is_absolute() else folder.as_posix(),  # it may be moved
        title=title,
        manifest=manifest,
        metadata=data.to_yaml(),
        origin=table(("", ""), [(key, plain(x, LONGEST)) for key, x in origin.items()], ()),
        metrics=metrics_table(manifest.metrics, run),
        is_reward=is_reward,
        is_adapter=is_adapter,
        is_alone=is_adapter and is_random and SFT not in manifest.parents,
        quantization=quantization,
        kwargs="".join(f", {key}={value!r}" for key, value in chat.template_kwargs.items()),
        max_tokens=config.get("data", {}).get("max_response_tokens", 64),
        end=chat.end_token_id,
        mean=repr((manifest.reward_mean or 0.0) - (reward_bias or 0.0)),
        std=repr(manifest.reward_std or 1.0),
    )


def metrics_table(metrics: Mapping[str, float], run: Path | None) -> str:
    """Return a table of the metrics of the evaluation, with 95% intervals; "" without any."""
    result = StageResult(metrics, [], [])
    if run is not None:
        with suppress(RLHFError):  # the run keeps no readable samples
            result = StageResult.read(metrics, run)
    rows = []
    for name in metrics:
        found = result.metric(name) if name.startswith("eval/") else None
        if found is not None:
            interval = "" if found.interval is None else "{:.3f} to {:.3f}".format(*found.interval)
            before = f"{metrics[f'start/{name}']:.4g}" if f"start/{name}" in metrics else ""
            rows.append((f"`{name}`", f"{found.value:.4g}", interval, before))
    head = ("on held-out data", "value", "95% interval", "before training")
    return table(head, rows, (1, 2, 3)) if rows else ""


def hub_id(source: str) -> str | None:
    """Return `source` where it can be the id of a repository on the hub, else None."""
    is_id = source.count("/") == 1 and not source.startswith((".", "~", "/")) and ":" not in source
    return source if is_id and not Path(source).suffix and not is_folder(source) else None


def license_of(*folders: Path | None) -> dict[str, Any]:
    """Return the license of the first folder whose model card or config.json states one.

    Returns: the keys license, license_name and license_link that are there; {} without any.
    """
    for folder in folders:
        if folder is None:
            continue
        try:
            stated = metadata_load(folder / CARD) or {}
        except (OSError, ValueError, yaml.YAMLError):
            stated = {}
        if not isinstance(stated.get("license"), str) and (folder / "config.json").is_file():
            stated = json_object(folder / "config.json")
        if isinstance(stated.get("license"), str):
            keys = ("license", "license_name", "license_link")
            return {key: str(stated[key]) for key in keys if key in stated}
    return {}


def hand_over(
    ready: Run,
    roles: Roles,
    role: str,
    metrics: Mapping[str, float],
    *,
    head: str | None,
    reward: tuple[float, float] | None = None,
    below: torch.Tensor | None = None,
    more: Path | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Path:
    """Write `final/` and return its path.

    below, more: as for `write_final`; verdicts: as in `Manifest`.
    """
    settings, export = ready.settings, ready.export
    folder = ready.folder / FINAL if export is None else export.folder
    sft = ready.parents.get(SFT)
    manifest = manifest_of(ready, folder, metrics, reward, verdicts)
    end_generation(roles, ready.chat)
    tokenizer = ready.tokenizer
    if head == REWARD:
        tokenizer = with_padding(tokenizer, ready.chat.end_token_ids)
    is_adapter = isinstance(roles.model, PeftModel) and role in roles.model.peft_config
    base = roles.causal_lm.name_or_path  # empty for weights of a seed
    card = model_card(
        folder, run_name(settings), manifest, settings.definition.data, ready.chat,
        is_adapter=is_adapter,
        reward_bias=score_bias(roles.heads[REWARD]) if head == REWARD else None,
        license=license_of(sft.path if sft else None, Path(base) if base else None),
        run=ready.folder if export is None else None,
    )  # fmt: skip
    with Working(f"writing {folder}"):
        write_final(folder, roles, role, tokenizer, manifest, head, below, more, card=card)
    if stands_on_random_weights(folder):
        print_line(
            f"{folder} is an adapter on random weights (model.from_config): the stages here make "
            "them again, other programs cannot; sft.finetune=full writes whole weights"
        )
    if export is None:
        leave_report(ready.folder, settings.definition)
    print_line(f"{settings.stage} {'finished' if export is None else 'exported'}: {folder}")
    return folder


def manifest_of(
    ready: Run,
    folder: Path,
    metrics: Mapping[str, float],
    reward: tuple[float, float] | None,
    verdicts: Mapping[str, Verdict] | None,
) -> Manifest:
    """Return the manifest of the model that is written to `folder`."""
    settings, export = ready.settings, ready.export
    ending = read_ending(ready.folder) if export is None else export.ending
    sft = ready.parents.get(SFT)
    inherited = sft.manifest if sft is not None and sft.is_adapter else None
    base = settings.model.name_or_path
    return Manifest(
        stage=settings.stage,
        base=str(Path(base).resolve()) if base and Path(base).is_dir() else base or FROM_CONFIG,
        base_seed=inherited.base_seed if inherited else settings.seed,
        parents={
            name: portable(final.path, folder, settings.outputs)
            for name, final in ready.parents.items()
        },
        tokenizer_hash=tokenizer_hash(ready.tokenizer),
        chat_template=str(ready.tokenizer.chat_template),
        reward_mean=reward[0] if reward else None,
        reward_std=reward[1] if reward else None,
        metrics=dict(metrics) | {"time/stage_s": time.perf_counter() - ready.started},
        config=settings.tree,
        versions=versions(),
        verdicts={name: asdict(verdict) for name, verdict in (verdicts or {}).items()},
        chosen={} if ending is None else asdict(ending),
    )


def portable(path: Path, folder: Path, outputs: Path) -> str:
    """Return the path of a model as the manifest in `folder` names it.

    It is relative to `folder` where both are in `outputs`, which may be moved, else absolute.
    """
    path, folder, outputs = path.resolve(), folder.resolve(), outputs.resolve()
    inside = path.is_relative_to(outputs) and folder.is_relative_to(outputs)
    return os.path.relpath(path, folder) if inside else str(path)


def end_generation(roles: Roles, chat: ChatFormat) -> None:
    """Let `generate` of the saved model stop where the responses were taught to stop."""
    generation = roles.causal_lm.generation_config
    if generation is not None:
        generation.eos_token_id = list(chat.end_token_ids)
        generation.pad_token_id = chat.pad_token_id
