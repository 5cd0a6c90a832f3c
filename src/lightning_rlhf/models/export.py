"""Writing of a role as the `final/` folder of its stage, atomically."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models.checkpoint import MANIFEST, Manifest
from lightning_rlhf.models.fingerprint import FINGERPRINT
from lightning_rlhf.models.roles import BASE, POLICY, REFERENCE, SFT, Roles


def write_final(
    folder: Path,
    roles: Roles,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    manifest: Manifest,
    head: str | None,
    below: Float[Tensor, " V"] | None = None,
    more: Path | None = None,
) -> None:
    """Write `role` of `roles` as the folder `folder`, atomically: completely or not at all.

    head: name of the scalar head to save with it; None saves no head.
    below: fingerprint of the model it was trained from, where training has changed that model.
    more: folder of further files to copy into `folder`.

    Raises StorageError where the disk is full.
    """
    with written_whole(folder, _size(roles, role)) as beside:
        beside.mkdir(parents=True)
        if more is not None:
            shutil.copytree(more, beside, dirs_exist_ok=True)
        stands_on = BASE if manifest.stage == "sft" else REFERENCE
        if isinstance(roles.model, PeftModel) and role in roles.model.peft_config:
            with exported(roles, role) as name:
                is_whole = name != role
                state = get_peft_model_state_dict(
                    roles.model, adapter_name=name, save_embedding_layers=False
                )
                save_file(_on_cpu(state), beside / "adapter_model.safetensors")
                inference = dataclasses.replace(roles.model.peft_config[name], inference_mode=True)
            stands_on = BASE if is_whole else stands_on
            if isinstance(inference.target_modules, set):  # its order differs between runs
                inference.target_modules = sorted(inference.target_modules)
            inference.base_model_name_or_path = _base_of(manifest, is_whole)
            inference.save_pretrained(str(beside))
        else:
            roles.causal_lm.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if head is not None:
            save_file(_on_cpu(roles.heads[head].state_dict()), beside / f"{head}_head.safetensors")
        below = roles.probe(stands_on) if below is None else below
        fingerprints = {"self": roles.probe(role), "below": below}
        save_file(fingerprints, beside / FINGERPRINT)
        (beside / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")


@contextmanager
def exported(roles: Roles, role: str) -> Iterator[str]:
    """Yield the name of an adapter to export for `role`.

    For the policy on an SFT adapter, it is a temporary adapter that concatenates both. Other
    roles yield their own adapter: PPO loads a reward adapter on top of the SFT adapter, which
    is loaded already.
    """
    stack = roles.adapters(role)
    if role != POLICY or len(stack) == 1:
        yield role
        return
    before = roles.role
    roles.model.base_model.add_weighted_adapter(
        list(stack), [1.0] * len(stack), "export", combination_type="cat"
    )
    try:
        yield "export"
    finally:
        roles.model.delete_adapter("export")
        roles.set_role(before)


def _size(roles: Roles, role: str) -> int:
    """Return the bytes of the adapter of `role`, or of the whole weights where it has none."""
    is_adapter = isinstance(roles.model, PeftModel) and role in roles.model.peft_config
    parts = roles.model.named_parameters()
    return sum(part.nbytes for name, part in parts if not is_adapter or f".{role}." in name)


def _base_of(manifest: Manifest, is_whole: bool) -> str:
    """Return folder or hub id of the model to which the adapter is applied.

    It is the SFT model where there is one, but the base for an adapter that includes SFT's
    (`is_whole`).
    """
    return manifest.base if is_whole or SFT not in manifest.parents else manifest.parents[SFT]


def _on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
