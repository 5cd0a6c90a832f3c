"""The section `reward` of the configuration: one component, or the sum of several by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.core.validation import build, refuse_unknown
from lightning_rlhf.rewards import config as rewards
from lightning_rlhf.rewards.address import redacted
from lightning_rlhf.rewards.config import ComponentConfig
from lightning_rlhf.stages.sections import section

SUM = "sum"
REWARDS: Mapping[str, type[ComponentConfig]] = {
    "function": rewards.FunctionConfig,
    "head": rewards.HeadConfig,
    "http": rewards.HTTPConfig,
    "model": rewards.ModelConfig,
    "random": rewards.RandomConfig,
}
"""Kind of a component of the reward -> class of its configuration."""


def read_reward(node: Any) -> dict[str, ComponentConfig]:
    """Return the components of the section `reward` by name; a single one is named by its kind."""
    kind = section({"reward": node}, "reward", "kind")["kind"]
    require(kind in [*REWARDS, SUM], "reward.kind", kind, ", ".join((*REWARDS, SUM)))
    if kind != SUM:
        return _weighing({kind: _component(node, "reward")})
    components = node.get("components")
    refuse_unknown(node, {"kind", "components"}, "reward.")
    require(isinstance(components, Mapping) and bool(components), "reward.components", components,
            "one or more rewards by name: +reward@reward.components.NAME=KIND")  # fmt: skip
    for name in components:
        require(re.fullmatch(r"[A-Za-z]\w*", str(name)) is not None, "a name in reward.components",
                name, "letters, digits and _, a letter first")  # fmt: skip
    return _weighing({
        str(name): _component(part, f"reward.components.{name}")
        for name, part in components.items()
    })  # fmt: skip


def _weighing(reward: dict[str, ComponentConfig]) -> dict[str, ComponentConfig]:
    if all(component.weight == 0 for component in reward.values()):
        raise ConfigError("every weight of reward is 0; allowed: one or more that are not")
    return reward


def check_components(tree: Any) -> None:
    """Raise ConfigError where keys are given for a component of a sum that was not added to it.

    tree: configuration; values may be missing, as after a misspelt name.
    """
    reward = tree.get("reward") if isinstance(tree, Mapping) else None
    parts = reward.get("components") if isinstance(reward, Mapping) else None
    parts = parts if isinstance(parts, Mapping) else {}
    parts = {str(name): part for name, part in parts.items() if isinstance(part, Mapping)}
    whole = [name for name, part in parts.items() if {"kind", "weight"} <= part.keys()]
    for name in parts.keys() - set(whole):
        kind = parts[name].get("kind", "KIND")
        close = difflib.get_close_matches(name, whole, n=1) if kind == "KIND" else []
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"there is no component {name!r} in reward.components; {hint}"
            f"+reward@reward.components.{name}={kind} puts one there, with all its keys"
        )


def check_normalization(config: PPOConfig, reward: Mapping[str, ComponentConfig]) -> None:
    """Raise ConfigError where both a component and the whole score use running moments."""
    own = [name for name, x in reward.items() if x.normalization == "running" or x.clip]
    if own and config.score_normalization != "none":
        raise ConfigError(
            f"ppo.score_normalization is {config.score_normalization!r} and the reward "
            f"{own[0]!r} is normalised by running moments or clipped already; allowed: one of "
            "the two, with ppo.score_normalization=none or normalization=none and clip=null"
        )


def redacted_section(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `reward` with users, passwords and queries removed from its URLs."""
    shown = dict(node)
    if "url" in shown:
        shown["url"] = redacted(shown["url"])
    if "components" in shown:
        parts = shown["components"]
        shown["components"] = {name: redacted_section(part) for name, part in parts.items()}
    return shown


def _component(node: Any, key: str) -> ComponentConfig:
    require(isinstance(node, Mapping), key, node, "a mapping of keys to values")
    kinds = ", ".join(REWARDS)
    require("kind" in node, f"{key}.kind", "missing", kinds)
    require(node["kind"] in list(REWARDS), f"{key}.kind", node["kind"], kinds)
    config = build(REWARDS[node["kind"]], node, key)
    config.check(key)
    return config
