"""Verdicts of fitness reports on a reward, for PPO and for stages that measure with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.io.console import print_line
from lightning_rlhf.models.checkpoint import PAGE, Final, Verdict, json_object
from lightning_rlhf.rewards.config import LearnedConfig, RandomConfig
from lightning_rlhf.runs.changes import differing_keys, read_config
from lightning_rlhf.runs.folders import CONFIG, FINAL, folder_of, reward_role
from lightning_rlhf.runs.stage import Settings, reward_key

RANDOM = Verdict(True, "Not fit: a random head means nothing, it only shows that all runs.", ())


def verdicts_on(
    settings: Settings, parents: Mapping[str, Final], *, refuses: bool = True
) -> dict[str, Verdict | None]:
    """Return the verdict on each reward model that stage=rm trained, by component.

    None for a model without a report. For the whole reward that of stage=eval_reward, where the run
    has one and stage=rm gave none. A component of weight 0 is never refused: it is not paid.

    Raises ConfigError where a model is unfit and its key `unfit` is refuse; never unless `refuses`.
    """
    verdicts: dict[str, Verdict | None] = {}
    for name, config in settings.reward.items():
        role = reward_role(settings, name)
        if isinstance(config, RandomConfig):
            verdicts[name] = RANDOM
        if not isinstance(config, LearnedConfig) or role not in parents:
            continue
        final = parents[role]
        if final.manifest is None:  # a classifier of another program
            continue
        verdict = verdicts[name] = final.verdict
        if (
            refuses
            and verdict is not None
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
    whole = ", ".join(settings.reward)
    if verdicts.get(whole) is None and (found := evaluated(settings)) is not None:
        verdicts[whole] = found
    return verdicts


def evaluated(settings: Settings) -> Verdict | None:
    """Return the verdict of stage=eval_reward of the run; None without one on this reward."""
    folder = folder_of(settings, "eval_reward")
    report = folder / FINAL / "fitness.json"
    if not report.is_file():
        return None
    then = read_config(folder / CONFIG, "delete it to go on")
    if differing_keys({"reward": then.get("reward")}, {"reward": settings.tree["reward"]}, ()):
        return None
    found: Any = json_object(report).get("judgement")
    return Verdict(**found) if Verdict.is_json(found) else None


def print_verdicts(verdicts: Mapping[str, Verdict | None], advice: str = "") -> None:
    """Print the verdict on each component of the reward, or that it has none.

    advice: what is added to one that is unfit.
    """
    for name, verdict in verdicts.items():
        if verdict is None:
            print_line(
                f"reward {name} has no fitness verdict (stage=rm needs held-out pairs for one): "
                "nothing says whether it is fit to be maximised",
                "yellow",
            )
        else:
            more = advice if verdict.is_unfit else ""
            print_line(f"reward {name}: {verdict.words}{more}", verdict.style)
