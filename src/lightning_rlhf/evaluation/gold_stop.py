"""The evaluation at which a run of PPO should have stopped, by a judge's gold scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lightning_rlhf.callbacks.evaluation import SAMPLES
from lightning_rlhf.core.errors import counted
from lightning_rlhf.core.metrics import GOLD, HELD_OUT
from lightning_rlhf.io.storage import json_lines
from lightning_rlhf.report.estimates import Interval, mean_interval, single
from lightning_rlhf.runs.measured import by_prompt, damage_named

ByPrompt = Mapping[int, Float[ndarray, " N"]]
"""Iteration of an evaluation -> a score's mean over the responses to each prompt."""
SEED = 0
"""Seed of the bootstraps, so that the same run has the same numbers."""


@dataclass(frozen=True)
class Point:
    """Iteration after which something holds, with its interval; None is beyond the run."""

    iteration: int | None
    interval: tuple[int, int | None]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.iteration} [{low}-{'end' if high is None else high}]"


@dataclass(frozen=True, kw_only=True)
class GoldStop:
    """Earliest evaluation whose gold score is as good as that of the best one and of the end."""

    step: int
    """Iteration of the evaluation at which to stop; 0 is the SFT model."""
    first: int
    """Earliest evaluation whose gold score is not below the best one's beyond the noise."""
    last: int
    """Latest such evaluation."""
    best: int
    """Evaluation with the highest gold score."""
    end: int
    """Last evaluation."""
    evaluations: int
    prompts: int
    gold: float
    """Mean gold score over prompts at `step`."""
    gold_at_best: float
    gold_at_end: float
    reward_rise: float
    """Reward at the end less the one at `step`, mean over the same prompts."""
    reward_interval: Interval
    """95% interval of `reward_rise`."""

    @property
    def point(self) -> Point:
        """Return the stop, with the evaluations that cannot be told from the best as interval."""
        return Point(self.step, (self.first, None if self.last == self.end else self.last))

    @property
    def diverges(self) -> bool:
        """Return whether the reward rose after the stop, beyond the noise; gold did not."""
        return self.reward_interval[0] > 0

    def __str__(self) -> str:
        head = f"stop at iteration {self.point} by the gold score"
        of = f"of {self.evaluations} evaluations on {counted(self.prompts, 'prompt')}"
        if self.step == self.best:
            at_end = "" if self.step == self.end else f"; at the end {self.gold_at_end:z.3g}"
            words = f"{head}: {self.gold:z.3g}, the highest {of}{at_end}"
        else:
            words = (
                f"{head}: {self.gold:z.3g}, the earliest {of} that is not below the highest "
                f"({self.gold_at_best:z.3g} at {self.best}) beyond the noise, nor below the end "
                f"({self.gold_at_end:z.3g})"
            )
        rise = f"from {self.point} on the reward rose by {self.reward_rise:.2g} and the gold score "
        return f"{words}; {rise}did not" if self.diverges else words


def find_gold_stop(gold: ByPrompt, reward: ByPrompt) -> GoldStop | None:
    """Return the earliest evaluation that is as good as the best and as the end.

        stop = min {t : high(g_t - g_b) >= 0 and mean(g_t) >= mean(g_T)}

    with g_t the gold scores of the prompts in evaluation t, b the evaluation with the highest mean,
    T the last one, and high the upper end of the 95% interval of the mean of paired differences, by
    bootstrap over prompts. The best of many evaluations is partly so by luck, which makes the
    differences to it larger and the stop later, not earlier.

    gold, reward: scores in evaluations of the same prompts, in the same order; NaN for a prompt
        without a gold score, which is left out.
    Returns: None with fewer than two evaluations, or fewer than two prompts with gold in all.
    """
    steps = sorted(gold)
    if len(steps) < 2:
        return None
    scores = np.stack([gold[step] for step in steps])
    known = ~np.isnan(scores).any(axis=0)
    if known.sum() < 2:
        return None
    scores = scores[:, known]
    means = scores.mean(axis=1)
    best = int(np.argmax(means))
    _, high = mean_interval(scores - scores[best], SEED)
    within = np.flatnonzero(high >= 0)
    stop = int(within[means[within] >= means[-1]][0])
    rise = (reward[steps[-1]] - reward[steps[stop]])[known]
    return GoldStop(
        step=steps[stop],
        first=steps[within[0]],
        last=steps[within[-1]],
        best=steps[best],
        end=steps[-1],
        evaluations=len(steps),
        prompts=int(known.sum()),
        gold=float(means[stop]),
        gold_at_best=float(means[best]),
        gold_at_end=float(means[-1]),
        reward_rise=float(rise.mean()),
        reward_interval=single(mean_interval(rise, SEED)),
    )


def paired_stop(folder: Path) -> GoldStop | None:
    """Return where to stop by the gold scores of the evaluations; None where they are not known.

    Evaluations of other prompts than those of the last one are left out.
    Raises CheckpointError where a file of samples is damaged.
    """
    gold: dict[int, ndarray] = {}
    reward: dict[int, ndarray] = {}
    prompts: list[int] | None = None
    for path in sorted((folder / SAMPLES).glob("eval_*.jsonl"), reverse=True):
        samples = [sample for _, sample in json_lines(path)]
        with damage_named(path):
            found = [sample["index"] for sample in samples]
            prompts = prompts or found
            if found == prompts:
                step = int(path.stem.removeprefix("eval_"))
                gold[step], reward[step] = (by_prompt(samples, name) for name in (GOLD, HELD_OUT))
    return find_gold_stop(gold, reward)
