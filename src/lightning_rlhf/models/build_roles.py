"""Loading of earlier stages' checkpoints as roles on one base, and of the critic.

Each is checked by its fingerprint: logits on a probe input, of its model and its parent model.
"""

import warnings
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.core import memory, ppo_config
from lightning_rlhf.core.errors import CheckpointError, ConfigError
from lightning_rlhf.kernels.patch import rounding, same_logits
from lightning_rlhf.models import checkpoint, loading
from lightning_rlhf.models import config as names
from lightning_rlhf.models.config import BASE, POLICY, REFERENCE, REWARD, SFT, ModelConfig
from lightning_rlhf.models.heads import ScalarHeads
from lightning_rlhf.models.roles import Roles

FINGERPRINT = "fingerprint.safetensors"
REROUNDED = {"int8": 0.1, "nf4": 3e-2}
"""Kind of rounding -> largest relative difference of the logits between two computations with it.

On one machine there is none. Another device may round a weight between two codes to the other.
"""


def fingerprint(final: checkpoint.Final, of: str) -> torch.Tensor | None:
    """Return the stored probe logits of the model ("self") or of its parent model ("below").

    The parent is the model that it was trained from, to which an adapter is applied. None where
    the checkpoint has no fingerprint. Raises CheckpointError where it cannot be read.
    """
    file = final.path / checkpoint.ROLES / FINGERPRINT
    if not file.is_file():
        return None
    with checkpoint.naming(str(file), ""):
        return load_file(file)[of]


def trained_on(final: checkpoint.Final) -> tuple[str, str]:
    """Return quantization and data type of the base of an adapter; whole weights have no base."""
    config = final.manifest.config if final.manifest and final.is_adapter else {}
    model = config.get("model") or {}
    return model.get("quantization", "none"), model.get("dtype", "float32")


def has_fingerprint(roles: Roles, role: str, final: checkpoint.Final, of: str) -> bool:
    """Return True if `role` gives the logits stored in `final`, or `final` has no fingerprint.

    They may differ by rounding. A quantised model may be used with a checkpoint of full precision,
    or of another kind of rounding; a different model deviates by more than that.
    """
    expected = fingerprint(final, of)
    if expected is None:
        return True
    found, here = roles.probe(role), loading.quantization_of(roles.causal_lm)
    trained = trained_on(final)
    tolerance = rounding(roles.causal_lm, trained[1])
    if here != "none":
        alike = (here, str(roles.causal_lm.dtype).removeprefix("torch.")) == trained
        tolerance = max(tolerance, REROUNDED[here]) if alike else 0.5
    return found.shape == expected.shape and same_logits(found, expected, tolerance)


def check_fingerprint(roles: Roles, role: str, final: checkpoint.Final, of: str) -> None:
    """Raise CheckpointError if `role` gives other logits than those stored in `final`."""
    if not has_fingerprint(roles, role, final, of):
        here, (there, _) = loading.quantization_of(roles.causal_lm), trained_on(final)
        why = f" with model.quantization={there}, which is {here} here" if here != there else ""
        raise CheckpointError(
            f"{final.path} does not fit: the {role} model here gives other logits than "
            f"{'it gave' if of == 'self' else 'the model that it was trained on gave'}{why}. Train "
            "it again from this model, or point to the checkpoint that belongs to it"
        )


SAMPLING_BYTES = 25
"""Bytes of a sampled position: token 8, mask 1, log-probability 4, value 4, 2 random numbers 8."""


def start_from(
    config: ModelConfig, sft: checkpoint.Final | None, *, trainable: bool, seed: int
) -> Roles:
    """Load the SFT model as the reference: whole weights, or an adapter on its base.

    sft: checkpoint of the SFT model; None uses the base model unchanged.
    trainable: True makes all weights trainable, for full fine-tuning; an adapter is merged.

    Raises CheckpointError for a reward model, and for another fingerprint.
    """
    if sft is None:
        return Roles(loading.load_causal_lm(config, trainable=trainable, seed=seed), config.kernels)
    if sft.manifest is not None and sft.manifest.stage == "rm":
        allowed = "the final/ folder of stage=sft, ppo or dpo"
        raise CheckpointError(f"{sft.path} is a reward model; allowed: {allowed}")
    if sft.manifest is None and sft.is_adapter:
        message = f"{sft.path} has no fingerprint that shows whether it belongs to this base model"
        warnings.warn(message, stacklevel=2)
    if trainable:
        roles = Roles(whole_weights(config, sft, None, seed), config.kernels)
    else:
        weights = sft.base_folder if sft.is_adapter else str(sft.path)
        base_seed = sft.manifest.base_seed if sft.manifest else seed
        model = loading.load_causal_lm(config, weights, trainable=False, seed=base_seed)
        roles = Roles(model, config.kernels)
        if sft.is_adapter:
            check_fingerprint(roles, BASE, sft, "below")
            roles.load_adapter(SFT, sft.path, trainable=False)
    check_fingerprint(roles, REFERENCE, sft, "self")
    return roles


def attach_reward(
    roles: Roles, role: str, final: checkpoint.Final, config: ModelConfig, tokenizer_hash: str
) -> Roles:
    """Add the reward model of `final` as `role` to the shared base, or load it with its own base.

    Returns: the roles whose `rewards` computes the reward; `roles` itself where the base is shared.

    Raises CheckpointError where it has another tokenizer, or an adapter on another SFT model.
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
                f"{final.path} was trained from another SFT model, on whose responses mean and "
                "deviation of its reward were measured: those of this one's may not be 0 and 1; "
                "reward.normalization=running measures both while PPO runs",
                stacklevel=2,
            )
        return whole_reward(final, role, config)
    head = load_head(final, REWARD, roles.hidden_size)
    check_fingerprint(roles, REFERENCE, final, "below")
    roles.load_adapter(role, final.adapter, trainable=False)
    roles.heads[role] = head
    check_fingerprint(roles, role, final, "self")
    return roles


def whole_reward(final: checkpoint.Final, role: str, config: ModelConfig) -> Roles:
    """Load a reward model of whole weights as `role` of a new Roles object."""
    model = loading.load_causal_lm(config, str(final.path), trainable=False, seed=0)
    owner = Roles(model, config.kernels)
    owner.heads[role] = load_head(final, REWARD, owner.hidden_size)
    owner.assign(role)
    check_fingerprint(owner, role, final, "self")
    return owner


def load_reward(final: checkpoint.Final, config: ModelConfig) -> Roles:
    """Load the reward model of `final` with its own base, independent of any policy."""
    manifest = final.require_manifest("rm")
    if not final.is_adapter:
        return whole_reward(final, REWARD, config)
    parent = final.parent(SFT)
    sft = None if parent is None else checkpoint.find(str(parent), f"the SFT model of {final.path}")
    roles = start_from(config, sft, trainable=False, seed=manifest.base_seed)
    return attach_reward(roles, REWARD, final, config, manifest.tokenizer_hash)


def warn_of_one_head(roles: Roles, role: str, uncertainty_coef: float, key: str) -> None:
    """Warn where uncertainty_coef is above 0 but the reward model has a single head."""
    heads: Any = roles.heads[role]
    if uncertainty_coef > 0 and heads.linear.out_features == 1:
        warnings.warn(
            f"{key}.uncertainty_coef is {uncertainty_coef:g}, but the reward model has one head: "
            "there is no deviation to penalise; rm.heads=5 trains an ensemble",
            stacklevel=2,
        )


def random_reward(roles: Roles, role: str, generator: torch.Generator) -> None:
    """Add a random reward head on the reference as `role`, for debugging."""
    roles.heads[role] = ScalarHeads.random(roles.hidden_size, 1, generator).requires_grad_(False)
    roles.assign(role)


LOWER = "lower data.max_response_tokens or data.max_prompt_tokens, to {limit} together"
"""Advice on how to shorten the texts of the data, to {limit} positions."""
WARNED: set[int] = set()
"""Numbers of positions that this process has warned of."""


def check_positions(
    roles: Roles, longest: int, what: str, lower: str = LOWER, *, warns: bool = True
) -> int | None:
    """Return how many learned positions a text leaves free; None of a model without such ones.

    Computed positions (rotary) allow longer texts: the first of a process is warned of, where
    `warns`. Raises ConfigError for one of more tokens than the model has learned positions for.

    longest: number of tokens of the longest text; what: its description; lower: advice, as LOWER.
    """
    model = roles.causal_lm
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        return None
    has = f"{what} has {longest} tokens, more than the {limit} that the model"
    advice = lower.format(limit=limit)
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    if any(m is not model.get_input_embeddings() and m.num_embeddings >= limit for m in tables):
        if longest > limit:
            raise ConfigError(f"{has} has positions for (max_position_embeddings); {advice}")
        return int(limit) - longest
    if longest > limit and warns and limit not in WARNED:
        WARNED.add(limit)
        reason = f"{has} was made for (max_position_embeddings), beyond which its answers and "
        warnings.warn(f"{reason}scores may be meaningless; {advice}", stacklevel=2)
    return None


def check_room(
    roles: Roles, rows: int, prompt: int, response: int, key: str, device: torch.device
) -> None:
    """Raise ConfigError where `device` cannot hold `rows` responses while they are sampled.

    Counted are what is allocated before the first token, and the cache of one row.
    prompt, response: largest numbers of tokens; `key` is the configuration key of the latter.
    """
    config, total = roles.causal_lm.config.get_text_config(), memory.total_memory(device)
    a_token = rows * SAMPLING_BYTES + cache_bytes(config, roles.causal_lm.dtype)
    need = (prompt + response) * a_token
    if need > total:
        raise ConfigError(
            f"{key} is {response}; allowed: at most {total // a_token - prompt}, since {rows} "
            f"responses at once would take {need / 2**30:.3g} GiB and more, and the device has "
            f"{total / 2**30:.3g} GiB"
        )


def cache_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in all layers of full attention, 0 if none."""
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
    """Add a new policy: an adapter on the reference or, beside a frozen one, all weights.

    Raises CheckpointError unless it starts as the SFT model.
    """
    reference = roles.reference
    before = reference.probe(REFERENCE)
    if reference is roles:
        roles.add_adapter(POLICY, config.lora, seed)
    else:
        roles.assign(POLICY)
    for owner, role in ((reference, REFERENCE), (roles, POLICY)):
        if not same_logits(owner.probe(role), before, rounding(reference.causal_lm)):
            why = "the policy's adapter changed its logits, a fault of the adapter library"
            if reference is not roles:
                why = "all its weights and the frozen base of the reference give other logits"
            raise CheckpointError(f"the {role} does not start as the SFT model: {why}")


def add_critic(
    roles: Roles,
    config: ModelConfig,
    kind: ppo_config.CriticKind,
    *,
    sft: checkpoint.Final | None,
    reward: checkpoint.Final | None,
    scale: tuple[float, float],
    seed: int,
) -> tuple[Roles, str]:
    """Add a value head on the policy's trunk, on an adapter of its own, or on a model of its own.

    reward: the reward model that the critic is initialised from; None starts every value at 0.
    scale: mean and standard deviation by which the reward model's output is standardised.

    Returns: the roles, and the name of the role in them, whose hidden states the head reads.

    Raises ConfigError where the critic is an adapter and the reward model is a whole model.
    """
    owner, role = roles, POLICY if kind == "head" else names.CRITIC
    if kind == "model":
        owner = Roles(whole_weights(config, sft, reward, seed), config.kernels)
        owner.assign(role)
    elif kind == "adapter":
        owner = roles.reference
    if kind == "adapter" and reward is None:
        owner.add_adapter(role, config.lora, seed)
    elif kind == "adapter" and reward is not None:
        if not reward.is_adapter:
            raise ConfigError(
                f"ppo.critic is 'adapter' and starts from {reward.path}, which is a whole model; "
                "allowed: ppo.critic=model, or ppo.critic_init=zero"
            )
        owner.load_adapter(role, reward.adapter, trainable=True)
    owner.heads[names.VALUE] = head = ScalarHeads(owner.hidden_size, 1)
    if reward is not None:
        # (reward - mean) / std of the reward model's mean head
        heads, (mean, std) = load_head(reward, REWARD, owner.hidden_size), scale
        with torch.no_grad():
            head.linear.bias.copy_(heads.linear.bias.mean().sub(mean).div(std))
            head.linear.weight.copy_(heads.linear.weight.mean(dim=0).div(std))
    return owner, role


def whole_weights(
    config: ModelConfig, sft: checkpoint.Final | None, reward: checkpoint.Final | None, seed: int
) -> PreTrainedModel:
    """Return the reward model, or without one the SFT model, as trainable fp32 weights.

    An adapter is merged into the model that it was trained on, quantised or not.
    """
    weights, adapters = None, []
    key = "policy.checkpoint" if reward is None else "ppo.critic"
    for final in (sft, reward):
        if final is not None and final.is_adapter:
            adapters.append(final.adapter)
        elif final is not None:
            weights, adapters = str(final.path), []
    if weights is None and sft is not None:  # an adapter on the base that it was trained on
        weights = sft.base_folder
        seed = sft.manifest.base_seed if sft.manifest else seed
    quantised = config.quantization != "none"
    model = loading.load_causal_lm(config, weights, trainable=not quantised, seed=seed)
    if quantised:
        model = model.dequantize(torch.float32).float()
    for adapter in adapters:
        checkpoint.check_weights(adapter)
        with checkpoint.naming(str(adapter), key):
            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return model.requires_grad_(True)


def load_head(final: checkpoint.Final, name: str, hidden_size: int) -> ScalarHeads:
    """Return the stored scalar heads `name` (one, or an ensemble) of `final`, frozen.

    Raises CheckpointError where there are none, or where they do not fit `hidden_size`.
    """
    file = final.path / checkpoint.ROLES / f"{name}_head.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{final.path} has no {file.name}: it is not a {name} model")
    with checkpoint.naming(str(file), ""):
        state = load_file(file)
        heads = ScalarHeads(hidden_size, len(state["linear.weight"]))
        heads.load_state_dict(state)
    return heads.requires_grad_(False)
