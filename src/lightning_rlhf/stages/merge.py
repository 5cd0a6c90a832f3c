"""A `final/` folder as whole weights, which every program loads without PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lightning_rlhf.core.config import DType
from lightning_rlhf.core.errors import CheckpointError
from lightning_rlhf.data.chat import ChatFormat
from lightning_rlhf.io.console import Working, print_line
from lightning_rlhf.kernels.patch import rounding_of, same_logits
from lightning_rlhf.models.build_roles import REROUNDED, fingerprint, load_head, whole_weights
from lightning_rlhf.models.checkpoint import Final, find
from lightning_rlhf.models.config import POLICY, REWARD, SFT, ModelConfig
from lightning_rlhf.models.loading import load_tokenizer
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.runs.folders import FINAL
from lightning_rlhf.runs.parents import trained_as
from lightning_rlhf.runs.stage import find_stage
from lightning_rlhf.stages.model_card import license_of, write_model


@torch.no_grad()
def write_merged(final: Final, out: Path, dtype: DType) -> Path:
    """Write the model of `final` as whole weights of type `dtype` to the folder `out`.

    Adapters are merged in float32. A multimodal base is written as its language model.

    Raises CheckpointError where the weights are not those that the stage wrote.
    """
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
    return out


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
