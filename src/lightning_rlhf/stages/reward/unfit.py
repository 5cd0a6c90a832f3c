"""The check before PPO of the fitness reports of its reward models."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.models.verdict import PAGE, Verdict
from lightning_rlhf.rewards.config import LearnedConfig
from lightning_rlhf.stages.console import print_line
from lightning_rlhf.stages.folder.folders import reward_role
from lightning_rlhf.stages.stage import Settings, reward_key


def verdicts_on(settings: Settings, parents: Mapping[str, Final]) -> dict[str, Verdict | None]:
    """Return the verdict on each reward model that stage=rm trained, by component.

    None for a model without a report. A component of weight 0 is never refused: it is not paid.

    Raises ConfigError where a model is unfit and its key `unfit` is refuse.
    """
    verdicts: dict[str, Verdict | None] = {}
    for name, config in settings.reward.items():
        role = reward_role(settings, name)
        if not isinstance(config, LearnedConfig) or role not in parents:
            continue
        final = parents[role]
        if final.manifest is None:  # a classifier of another program
            continue
        verdict = verdicts[name] = final.verdict
        if (
            verdict is not None
            and verdict.is_unfit
            and config.weight != 0
            and config.unfit == "refuse"
        ):
            key = f"{reward_key(settings, name)}.unfit"
            raise ConfigError(
                f"reward {name} is unfit by its fitness report {final.path / PAGE}: "
                f"{verdict.words} Train a better reward model; or {key}=warn runs PPO on it all "
                "the same"
            )
    return verdicts


def print_verdicts(verdicts: Mapping[str, Verdict | None]) -> None:
    """Print the verdict on each component of the reward, or that it has none."""
    for name, verdict in verdicts.items():
        if verdict is None:
            print_line(
                f"reward {name} has no fitness verdict (stage=rm needs held-out pairs for one): "
                "nothing says whether it is fit to be maximised",
                "yellow",
            )
        else:
            print_line(verdict_line(name, verdict), verdict.style)


def verdict_line(name: str, verdict: Verdict) -> str:
    """Return the verdict on the component `name` of the reward in one line."""
    advice = " PPO is run on it all the same (unfit=warn)." * verdict.is_unfit
    return f"reward {name}: {verdict.words}{advice}"
