"""Scores of the responses of policies: by the reward, the SFT model and the judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rlhf.callbacks.evaluation import Judge, evaluated
from lightning_rlhf.core.device_memory import MicrobatchSize
from lightning_rlhf.core.results import EvaluationResult
from lightning_rlhf.models.roles import SFT, Roles
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout.decoded import decode_responses
from lightning_rlhf.rollout.score import score
from lightning_rlhf.stages.policy_answers import Part, Task, load_policy
from lightning_rlhf.stages.reward.build_rewards import build_reward
from lightning_rlhf.stages.reward.reward_formats import check_formats


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The reward, the SFT model as the reference, and the judge."""

    task: Task
    roles: Roles
    """Models on the device, whose reference is the SFT model."""
    reward: Reward
    judge: Judge | None
    microbatch: MicrobatchSize
    """Number of responses that the models read at a time."""

    @classmethod
    def load(cls, task: Task, light: Mapping[str, Any], judge: Judge | None) -> Scorer:
        """Load the SFT model and the reward.

        light: checked components of the reward, as `light_sources` returns them.
        """
        settings = task.ready.settings
        roles, _ = load_policy(task, task.ready.parents.get(SFT))
        microbatch = MicrobatchSize(f"{settings.stage}.batch_size", task.config.batch_size)
        reward = build_reward(task.ready, roles, light, microbatch)
        roles.to(task.ready.device)
        check_formats(task.ready, reward)
        return cls(task=task, roles=roles, reward=reward, judge=judge, microbatch=microbatch)

    def samples(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield one sample a response that this process sampled, as `evaluated` returns them."""
        ready = self.task.ready
        names = [term.name for term in self.reward.terms]
        for _, rollout in parts:
            decoded = decode_responses(rollout.to(ready.device), self.task.rows, ready.chat)
            scores = score(
                self.roles,
                decoded,
                self.reward,
                temperature=self.task.config.temperature,
                batch_size=self.microbatch.rows,
                over_vocabulary=False,
            )
            result = EvaluationResult(rollout=rollout, decoded=decoded, scores=scores.to("cpu"))
            yield from evaluated(result, names, self.judge)
