"""Before PPO starts: what the fitness reports of its reward's models say."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_rlhf.cli.console import say
from lightning_rlhf.cli.folders import reward_role
from lightning_rlhf.cli.settings import Settings, reward_key
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.verdict import Verdict
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.report.fitness_page import PAGE
from lightning_rlhf.rewards.config import LearnedConfig


def check_fit(settings: Settings, parents: Mapping[str, Final]) -> dict[str, Verdict]:
    """Show the verdict on each reward model that stage=rm trained; return them by component.

    A component of weight 0 is not paid, so that it is never refused.

    Raises ConfigError where one is unfit and its key `unfit` is refuse.
    """
    verdicts = {}
    for name, config in settings.reward.items():
        role = reward_role(settings, name)
        if not isinstance(config, LearnedConfig) or role not in parents:
            continue
        final = parents[role]
        if final.manifest is None:  # a classifier of another program
            continue
        if final.verdict is None:
            say(
                f"reward {name}: {final.path} has no fitness verdict (stage=rm needs held-out "
                "pairs for one): nothing says whether it is fit to be maximised",
                "yellow",
            )
            continue
        verdict = verdicts[name] = final.verdict
        if verdict.is_unfit and config.weight != 0 and config.unfit == "refuse":
            key = f"{reward_key(settings, name)}.unfit"
            raise ConfigError(
                f"reward {name} is unfit by its fitness report {final.path / PAGE}: "
                f"{verdict.words} {'; '.join(verdict.reasons)}. Train a better reward model; or "
                f"{key}=warn runs PPO on it all the same"
            )
        say(verdict_line(name, verdict), verdict.style)
    return verdicts


def verdict_line(name: str, verdict: Verdict) -> str:
    """Return the verdict on the component `name` of the reward in one line."""
    advice = " PPO is run on it all the same (unfit=warn)." * verdict.is_unfit
    return f"reward {name}: {verdict.words}{advice}"
