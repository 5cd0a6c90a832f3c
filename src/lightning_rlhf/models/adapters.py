"""Adapters of a role as files, stacked into one where the role has several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from lightning_rlhf.models import checkpoint, heads
from lightning_rlhf.models.roles import Roles


def save_adapter(
    folder: Path, roles: Roles, name: str, base: str, rewards: nn.Module | None = None
) -> None:
    """Write an adapter of the model.

    base: folder or hub id of the weights that it is applied to.
    rewards: heads with which the adapter is written as that of a sequence classifier, where
        transformers has one for the base; None writes that of the language model.
    """
    state = get_peft_model_state_dict(roles.model, adapter_name=name, save_embedding_layers=False)
    config = replace(roles.model.peft_config[name], inference_mode=True)
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
