"""The end of a stage: `final/` with the trained model, its tokenizer and its manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from peft import PeftModel

from lightning_rlhf.callbacks.working import Working
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.models.checkpoint import stands_on_random_weights
from lightning_rlhf.models.export import write_final
from lightning_rlhf.models.manifest import FROM_CONFIG, Manifest, tokenizer_hash, versions
from lightning_rlhf.models.roles import REWARD, SFT, Roles
from lightning_rlhf.models.sequence_classifier import score_bias, with_padding
from lightning_rlhf.models.verdict import Verdict
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.ending import read_ending
from lightning_rlhf.stages.folder.folders import FINAL, run_name
from lightning_rlhf.stages.model_card import license_of, model_card
from lightning_rlhf.stages.prepare import Prepared
from lightning_rlhf.stages.run_report import leave_report


def hand_over(
    ready: Prepared,
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
    ready: Prepared,
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
