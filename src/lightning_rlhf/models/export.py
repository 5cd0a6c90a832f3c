"""Writing of a role as the `final/` folder of its stage, atomically."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.models import build_roles, checkpoint, heads
from lightning_rlhf.models.config import BASE, REFERENCE, REWARD, SFT
from lightning_rlhf.models.roles import Roles


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
    with written_whole(folder, size, "folder") as beside:
        own = beside / checkpoint.ROLES
        own.mkdir(parents=True)
        if more is not None:
            shutil.copytree(more, beside, dirs_exist_ok=True)
        is_complete = is_adapter and len(roles.adapters(role)) > 1 and head != REWARD
        stands_on = BASE if manifest.stage == "sft" or is_complete else REFERENCE
        below = roles.probe(stands_on) if below is None else below
        fingerprints = {"self": roles.probe(role), "below": below}
        rewards = roles.heads[REWARD] if head == REWARD else None
        if is_adapter:
            sft = manifest.parents.get(SFT)
            parent = base = manifest.base if sft is None else str((folder / sft).resolve())
            with adapter_to_export(roles, role) as name:
                if sft is not None and name != role:  # it includes SFT's
                    base = checkpoint.find(parent, SFT).base_folder or manifest.base
                save_adapter(beside, roles, name, base, rewards)
            if rewards is not None:  # PPO stacks it on the SFT adapter, which is loaded already
                save_adapter(own, roles, role, parent)
        else:
            causal_lm = roles.causal_lm if dtype is None else roles.causal_lm.to(dtype)
            heads.save_whole(beside, causal_lm, rewards, tokenizer.pad_token_id)
        tokenizer.save_pretrained(beside)
        if head is not None:
            state = {k: x.cpu().contiguous() for k, x in roles.heads[head].state_dict().items()}
            save_file(state, own / f"{head}_head.safetensors")
        save_file(fingerprints, own / build_roles.FINGERPRINT)
        if card is not None:
            (beside / "README.md").write_text(card, encoding="utf-8")
        record = json.dumps(dataclasses.asdict(manifest), indent=2)
        (beside / checkpoint.MANIFEST).write_text(f"{record}\n")


def save_adapter(
    folder: Path, roles: Roles, name: str, base: str, rewards: nn.Module | None = None
) -> None:
    """Write an adapter of the model.

    base: folder or hub id of the weights that it is applied to.
    rewards: heads with which the adapter is written as that of a sequence classifier, where
        transformers has one for the base; None writes that of the language model.
    """
    state = get_peft_model_state_dict(roles.model, adapter_name=name, save_embedding_layers=False)
    config = dataclasses.replace(roles.model.peft_config[name], inference_mode=True)
    if isinstance(config.target_modules, set):  # its order differs between runs
        config.target_modules = sorted(config.target_modules)
    if rewards is not None:
        config, state = heads.classifier_adapter(config, state, roles.causal_lm, rewards)
    config.base_model_name_or_path = base
    state = {name: matrix.detach().cpu().contiguous() for name, matrix in state.items()}
    save_file(state, folder / checkpoint.OF_ADAPTER)
    config.save_pretrained(str(folder))


@contextmanager
def adapter_to_export(roles: Roles, role: str) -> Iterator[str]:
    """Yield the name of an adapter to export for `role`.

    On an SFT adapter, it is a temporary adapter that concatenates both; else the role's own.
    """
    before, stack = roles.role, [*roles.adapters(role)]
    if len(stack) == 1:
        yield role
        return
    add, weights = roles.model.base_model.add_weighted_adapter, [1.0] * len(stack)
    add(stack, weights, "export", combination_type="cat")
    try:
        yield "export"
    finally:
        roles.model.delete_adapter("export")
        roles.set_role(before)
