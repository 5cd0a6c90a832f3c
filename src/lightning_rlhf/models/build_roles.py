"""Loading of earlier stages' checkpoints as roles on one base, each checked by its fingerprint."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightning_rlhf.core.device_memory import total_memory
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.kernels.patch import rounding, same_logits
from lightning_rlhf.models.checkpoint import Final, find, load_head
from lightning_rlhf.models.config import ModelConfig
from lightning_rlhf.models.fingerprint import check_fingerprint, has_fingerprint
from lightning_rlhf.models.heads import RewardHeads
from lightning_rlhf.models.loading import load_causal_lm
from lightning_rlhf.models.roles import (
    BASE,
    POLICY,
    REFERENCE,
    REWARD,
    SFT,
    Roles,
)

SAMPLING_BYTES = 25
"""Bytes per sampled response position: token 8, mask 1, log-probability 4, value 4, and 4 for each
of the two copies of its random number, on the CPU and on the device."""


def start_from(config: ModelConfig, sft: Final | None, *, trainable: bool, seed: int) -> Roles:
    """Load the SFT model as the reference: whole weights, or an adapter on its base.

    sft: checkpoint of the SFT model; None uses the base model unchanged.
    trainable: True makes all weights trainable, for full fine-tuning.

    Raises CheckpointError where `sft` is a reward model, an adapter that is to be fine-tuned in
    full, or does not match its fingerprint.
    """
    if sft is None:
        return Roles(load_causal_lm(config, trainable=trainable, seed=seed), config.kernels)
    if sft.manifest is not None and sft.manifest.stage == "rm":
        raise CheckpointError(
            f"{sft.path} is a reward model; allowed: the final/ folder of stage=sft, ppo or dpo"
        )
    if sft.manifest is None and sft.is_adapter:
        warnings.warn(
            f"{sft.path} has no fingerprint: nothing tells whether it belongs to this base model",
            stacklevel=2,
        )
    if not sft.is_adapter:
        model = load_causal_lm(config, str(sft.path), trainable=trainable, seed=seed)
        roles = Roles(model, config.kernels)
        check_fingerprint(roles, REFERENCE, sft, "self")
        return roles
    if trainable:
        raise CheckpointError(
            f"finetune=full cannot start from {sft.path}, which is an adapter; allowed: "
            "finetune=lora, or an SFT model trained with sft.finetune=full"
        )
    base_seed = sft.manifest.base_seed if sft.manifest else seed
    model = load_causal_lm(config, sft.base_folder, trainable=False, seed=base_seed)
    roles = Roles(model, config.kernels)
    check_fingerprint(roles, BASE, sft, "below")
    roles.load_adapter(SFT, sft.path, trainable=False)
    check_fingerprint(roles, REFERENCE, sft, "self")
    return roles


def attach_reward(
    roles: Roles, role: str, final: Final, config: ModelConfig, tokenizer_hash: str
) -> Roles:
    """Add the reward model of `final` as `role` to the shared base, or load it with its own base.

    Returns: the roles whose `rewards` computes the reward; `roles` itself where the base is shared.

    Raises CheckpointError where the reward model has another tokenizer, or its adapter was trained
    on another SFT model.
    """
    manifest = final.require_manifest("rm")
    if manifest.tokenizer_hash != tokenizer_hash:
        raise CheckpointError(
            f"{final.path} was trained with another tokenizer (vocabulary "
            f"{manifest.tokenizer_hash}, the policy's is {tokenizer_hash}): its reward would be "
            "read off the wrong tokens. Train a reward model from this SFT model with stage=rm"
        )
    if not final.is_adapter:
        if not has_fingerprint(roles, REFERENCE, final, "below"):
            warnings.warn(
                f"{final.path} was trained from another SFT model, on whose responses the mean and "
                "standard deviation of its reward were measured: responses of this SFT model may "
                "not start at 0, nor have a deviation of 1; reward.normalization=running measures "
                "both while PPO runs",
                stacklevel=2,
            )
        return whole_reward(final, role, config)
    head = load_head(final, REWARD, roles.hidden_size)
    check_fingerprint(roles, REFERENCE, final, "below")
    roles.load_adapter(role, final.adapter, trainable=False)
    roles.heads[role] = head
    check_fingerprint(roles, role, final, "self")
    return roles


def whole_reward(final: Final, role: str, config: ModelConfig) -> Roles:
    """Load a reward model of whole weights as `role` of a new Roles object."""
    owner = Roles(load_causal_lm(config, str(final.path), trainable=False, seed=0), config.kernels)
    owner.heads[role] = load_head(final, REWARD, owner.hidden_size)
    owner.assign(role)
    check_fingerprint(owner, role, final, "self")
    return owner


def load_reward(final: Final, config: ModelConfig) -> Roles:
    """Load the reward model of `final` with its own base, independent of any policy."""
    manifest = final.require_manifest("rm")
    if not final.is_adapter:
        return whole_reward(final, REWARD, config)
    parent = final.parent(SFT)
    sft = None if parent is None else find(str(parent), f"the SFT model of {final.path}")
    roles = start_from(config, sft, trainable=False, seed=manifest.base_seed)
    return attach_reward(roles, REWARD, final, config, manifest.tokenizer_hash)


def warn_of_one_head(roles: Roles, role: str, uncertainty_coef: float, key: str) -> None:
    """Warn where uncertainty_coef is above 0 but the reward model has a single head."""
    heads = roles.heads[role]
    assert isinstance(heads, RewardHeads)
    if uncertainty_coef > 0 and heads.linear.out_features == 1:
        warnings.warn(
            f"{key}.uncertainty_coef is {uncertainty_coef:g}, but the reward model has one head: "
            "there is no deviation to price; rm.heads=5 trains an ensemble",
            stacklevel=2,
        )


def random_reward(roles: Roles, role: str, generator: torch.Generator) -> None:
    """Add a random reward head on the reference as `role`, for debugging."""
    roles.heads[role] = RewardHeads.random(roles.hidden_size, 1, generator).requires_grad_(False)
    roles.assign(role)


LOWER = "lower data.max_response_tokens or data.max_prompt_tokens, to {limit} together"
"""Advice on how to shorten the texts of the data."""
WARNED: set[int] = set()
"""Numbers of positions that this process has warned of."""


def check_positions(roles: Roles, longest: int, what: str, lower: str = LOWER) -> None:
    """Raise ConfigError where a text has more tokens than the model has learned positions for.

    Where the positions are computed (rotary), a longer text is possible: the first one of a process
    is warned of.

    longest: number of tokens of the longest text.
    what: description of that text, for the message.
    lower: advice on how to shorten it, for the message, with the number of positions as {limit}.
    """
    refuse_positions(roles, longest, what, lower)
    limit = getattr(roles.causal_lm.config, "max_position_embeddings", None)
    if limit is not None and longest > limit and limit not in WARNED:
        WARNED.add(limit)
        warnings.warn(
            f"{what} has {longest} tokens, more than the {limit} that the model was made for "
            f"(max_position_embeddings): its answers and scores may be meaningless there; "
            + lower.format(limit=limit),
            stacklevel=2,
        )


def refuse_positions(roles: Roles, longest: int, what: str, lower: str = LOWER) -> None:
    """Raise the ConfigError of `check_positions`; issue no warning."""
    model = roles.causal_lm
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if any(m is not model.get_input_embeddings() and m.num_embeddings >= limit for m in tables):
        raise ConfigError(
            f"{what} has {longest} tokens, but the model has positions for {limit} "
            f"(max_position_embeddings); {lower.format(limit=limit)}"
        )


def check_room(
    roles: Roles, rows: int, prompt: int, response: int, key: str, device: torch.device
) -> None:
    """Raise ConfigError where `device` cannot hold `rows` responses while they are sampled.

    The estimate covers the memory that is allocated before the first token, and the cached keys
    and values of one row.

    prompt, response: largest numbers of tokens; `key` is the configuration key of the latter.
    """
    config, there = roles.causal_lm.config.get_text_config(), total_memory(device)
    a_token = rows * SAMPLING_BYTES + cache_bytes(config, roles.causal_lm.dtype)
    need = (prompt + response) * a_token
    if need > there:
        raise ConfigError(
            f"{key} is {response}; allowed: at most {there // a_token - prompt}, since {rows} "
            f"responses at once would take {need / 2**30:.3g} GiB and more, and the device has "
            f"{there / 2**30:.3g} GiB"
        )


def cache_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in all layers of full attention; 0 without
    any."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * kinds.count("full_attention") * shared * size * dtype.itemsize)


def check_vocabulary(roles: Roles, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError where the tokenizer has ids for which the model has no embedding."""
    if len(tokenizer) > roles.vocab_size:
        raise ConfigError(
            f"model.tokenizer {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, but the "
            f"model only {roles.vocab_size}; use the tokenizer that belongs to the model"
        )


def add_policy(roles: Roles, config: ModelConfig, seed: int) -> None:
    """Add a new policy adapter, and check that it changes neither the reference nor the policy.

    Raises CheckpointError where the logits of the reference, or of the untrained policy, differ
    from the SFT model's.
    """
    before = roles.probe(REFERENCE)
    roles.add_adapter(POLICY, config.lora, seed)
    for role in (REFERENCE, POLICY):
        if not same_logits(roles.probe(role), before, rounding(roles.causal_lm)):
            raise CheckpointError(
                f"the {role} does not start as the SFT model: its logits changed when the "
                "policy's adapter was added. This is a fault of the adapter library's version"
            )
