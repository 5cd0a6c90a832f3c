"""The stages there are: those of this package, and those that a configuration defines itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.core.errors import ConfigError, require
from lightning_rlhf.io.user_code import load_object
from lightning_rlhf.stages import dpo, eval_policy, eval_reward, ppo, rank, rm, sft
from lightning_rlhf.stages.console import CONF
from lightning_rlhf.stages.stage import Stage

STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        sft.STAGE,
        rm.STAGE,
        ppo.STAGE,
        dpo.STAGE,
        rank.STAGE,
        eval_policy.STAGE,
        eval_reward.STAGE,
    )
}
"""Name -> stage of this package."""
DEFINITION = "definition"
"""Key that names the `Stage` object, in the section of a stage outside this package."""


def stage_names(tree: Mapping[Any, Any]) -> list[str]:
    """Return the names of the stages whose sections may stand in a configuration."""
    own = (
        str(key)
        for key, node in tree.items()
        if key not in STAGES and isinstance(node, Mapping) and DEFINITION in node
    )
    return [*STAGES, *own]


def chosen_stage(tree: Mapping[str, Any]) -> Stage:
    """Return the stage that a configuration chooses.

    Raises ConfigError where it chooses none, an unknown one, or one whose definition is not a
    `Stage` of that name.
    """
    names = stage_names(tree)
    if "stage" not in tree or tree["stage"] is None:
        raise ConfigError(
            f"no stage is chosen; allowed: stage={'|'.join(names)}, or recipe=quickstart for all "
            "of them"
        )
    name = tree["stage"]
    is_advantage = name in {file.stem for file in (CONF / "advantage").glob("*.yaml")}
    meant = f"; or stage=ppo advantage={name}" if is_advantage else ""
    own = "; +stages=NAME stage=NAME for stages/NAME.yaml in a folder of your own"
    require(name in names, "stage", name, ", ".join(names) + meant + own)
    if name in STAGES:
        section = tree.get(name)
        if isinstance(section, Mapping) and DEFINITION in section:
            raise ConfigError(
                f"{name}.{DEFINITION} is {section[DEFINITION]!r}, but {name} is a stage of the "
                "package; allowed: another name for a stage of your own"
            )
        return STAGES[name]
    source, key = tree[name][DEFINITION], f"{name}.{DEFINITION}"
    stage: Stage = load_object(source, key, "stage", lambda found: isinstance(found, Stage))
    require(stage.name == name, key, source, f"a stage of the name {name!r}; it is {stage.name!r}")
    return stage
