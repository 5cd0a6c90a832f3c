"""Construction of the sampler that the configuration names."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.core.errors import ConfigError, RLHFError, require
from lightning_rlhf.io.user_code import FAULTS, load_class
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.checked_sampler import KEY, CheckedSampler
from lightning_rlhf.rollout.critic import Critic
from lightning_rlhf.rollout.hf import HFSampler
from lightning_rlhf.rollout.native import NativeSampler
from lightning_rlhf.rollout.sampler import Sampler, SamplingParams

OURS = ("native", "hf")
"""Names of the package's samplers; any other name is that of a user's class."""


def build_sampler(
    name: str, roles: Roles, params: SamplingParams, critic: Critic | None, key: str = KEY
) -> Sampler:
    """Return the sampler of that name; a user's is wrapped in a `CheckedSampler`.

    key: configuration key that holds the name, for the errors.

    Raises: ConfigError where it does not fit the model, or does not name a sampler.
    """
    if name == "native":
        require(roles.caches, key, name,
                f"hf, for {roles.causal_lm.config.model_type}, which takes no cache")  # fmt: skip
        on_trunk = critic is not None and critic.shares_trunk
        return NativeSampler(roles, params, critic.head if critic and on_trunk else None)
    if name == "hf":
        return HFSampler(roles, params)
    try:
        return CheckedSampler(
            load_sampler(name, key)(roles, params),
            name,
            max_response_tokens=params.max_response_tokens,
            vocab_size=roles.vocab_size,
            key=key,
        )
    except FAULTS as error:
        if isinstance(error, RLHFError):
            raise
        raise ConfigError(f"{key} is {name!r}, which cannot be built: {error!r}") from error


def check_sampler(name: str, key: str = KEY) -> None:
    """Raise ConfigError unless the name is that of a sampler; a user's class is loaded."""
    if name not in OURS:
        load_sampler(name, key)


def load_sampler(name: str, key: str = KEY) -> Any:
    """Return the class that `path/to/file.py:Class` or `package.module:Class` names.

    Raises: ConfigError where it does not name a class with the members of `Sampler`.
    """
    found = load_class(name, key)
    missing = [part for part in ("sample", "is_exact") if not hasattr(found, part)]
    if missing:
        raise ConfigError(
            f"{key} is {name!r}, which has no {' and no '.join(missing)}; allowed: a class "
            "with both, see lightning_rlhf.rollout.sampler.Sampler"
        )
    return found
