"""Modules that return what the real stages return, made of invented numbers, and run in no time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rlhf.callbacks import compute
from lightning_rlhf.core.records import DecodedResponses, Experience, Rollout, Scores, UpdateStats
from lightning_rlhf.core.results import RESULT, EvaluationResult, IterationResult, SFTScores, Step
from lightning_rlhf.core.shaping import AS_IT_IS
from lightning_rlhf.rewards.weighted import Reward

from ..composing import parsed_files as parsed_files

UPDATES = 2


class Chat:
    def show(self, tokens: Sequence[int]) -> str:
        return " ".join(f"t{token}" for token in tokens)

    decode_response = show


def make_experience(**changes: Any) -> Experience:
    """Two responses, of 3 and of 1 token, after prompts of 1 token.

    kl sums to 0.6 and -0.1, rewards to 1.4 and -0.9.
    """
    fields: dict[str, Any] = {
        "tokens": torch.tensor([[9, 1, 2, 3], [8, 4, 0, 0]]),
        "mask": torch.tensor([[True, True, True, True], [True, True, False, False]]),
        "response_mask": torch.tensor([[True, True, True], [True, False, False]]),
        "old_logprobs": torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]]),
        "ref_logprobs": torch.tensor([[-1.1, -1.2, -1.3], [-1.9, 0.0, 0.0]]),
        "old_values": torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]]),
        "kl": torch.tensor([[0.1, 0.2, 0.3], [-0.1, 0.0, 0.0]]),
        "rewards": torch.tensor([[-0.1, -0.2, 1.7], [-0.9, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.0, 0.0]]),
        "returns": torch.tensor([[2.0, 1.0, 3.0], [-2.0, 0.0, 0.0]]),
        "component_scores": torch.tensor([[2.0], [-1.0]]), "score": torch.tensor([2.0, -1.0]),
        "ended": torch.tensor([True, False]), "index": torch.tensor([1, 0]),
    }  # fmt: skip
    return Experience(**{**fields, **changes})


def make_updates() -> tuple[UpdateStats, ...]:
    """Two finite updates whose every other number is 1 and 3."""
    names = UpdateStats.__dataclass_fields__
    finite = {"nonfinite": torch.tensor(0.0)}
    return tuple(UpdateStats(**dict.fromkeys(names, torch.tensor(v)) | finite) for v in (1.0, 3.0))


class FakePPO(LightningModule):
    """Manual optimization with two optimizer steps an iteration."""

    def __init__(self, components: tuple[str, ...] = ("head",)) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.iteration = 0
        self.chat = Chat()
        self.config = SimpleNamespace(group_size=2, importance_mask=None, resample_groups=0)
        terms = tuple(replace(AS_IT_IS[0], name=name) for name in components)
        prompts = {
            split: [{"prompt": f"{split} question {i} [b]?"} for i in range(2)]
            for split in ("train", "val")
        }
        self.collector = SimpleNamespace(
            reward=Reward(terms, (abs,) * len(terms)),  # of which none says why
            prompts=prompts,
            decode=lambda experience, split: SimpleNamespace(responses=[split] * len(experience)),
        )

    def parts(self) -> Tensor:
        """[2,K] with column k = (k + 1) * (2 + iteration, -1 + iteration)."""
        score = torch.tensor([2.0, -1.0]) + self.iteration
        count = len(self.collector.reward.terms)
        return torch.stack([(k + 1) * score for k in range(count)], dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        for _ in range(UPDATES):
            self.optimizers().step()
        self.iteration += 1
        result = self.result()
        self.experience = result.experience
        return {RESULT: result}

    def result(self) -> IterationResult:
        score = torch.tensor([2.0, -1.0]) + self.iteration
        return IterationResult(
            experience=make_experience(score=score, component_scores=self.parts()),
            updates=make_updates(), kl_coef=0.05, ent_coef=0.01, padding=torch.tensor(0.25),
            seconds={"rollout": 2.0, "score": 1.0, "update": 1.0, "other": 0.5},
        )  # fmt: skip

    def validation_step(self, batch: Any, batch_idx: int) -> EvaluationResult:
        trained = make_experience()
        shared = {name: getattr(trained, name) for name in ("tokens", "mask", "response_mask")}
        rollout = Rollout(
            **shared, ended=trained.ended, logprobs=trained.old_logprobs, values=torch.zeros(2, 3),
            index=torch.tensor([0, 1]),
        )  # fmt: skip
        ref = torch.tensor([[-1.5, -1.0, -1.0], [-1.0, 0.0, 0.0]])
        score = torch.tensor([1.0, 0.0]) + self.iteration
        rows, texts = self.collector.prompts["val"], ["t1 t2 t3", "t4"]
        decoded = DecodedResponses(rollout=rollout, rows=rows, responses=texts, decode=str)
        scores = Scores(component_scores=self.parts(), score=score, ref_logprobs=ref)
        return EvaluationResult(rollout=rollout, decoded=decoded, scores=scores)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["iteration"] = self.iteration

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.iteration = checkpoint["iteration"]


class FakeSFT(LightningModule):
    """Batch k has k + 1 target tokens of loss k, so that a mean of means is not the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.weight.sum() * 0.0 + float(batch_idx)
        return {"loss": loss, RESULT: self.result(batch_idx)}

    def result(self, batch_idx: int) -> Step:
        loss, tokens = torch.tensor(float(batch_idx)), torch.tensor(batch_idx + 1)
        scores = SFTScores(nll_sum=loss * tokens, tokens=tokens)
        return Step(loss=loss, scores=scores, grad_norm=torch.tensor(0.25), is_made=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = torch.tensor(batch_idx + 1)
        return SFTScores(nll_sum=torch.tensor(2.0 * batch_idx), tokens=tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.fixture(autouse=True)
def _invented_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an iteration of FakePPO, and a step of FakeSFT, computes."""
    totals = {
        "generated_tokens": 4, "scored_tokens": 12, "trained_tokens": 6, "rollout_flops": 10.0,
        "score_flops": 20.0, "update_flops": 30.0, "flops": 60.0, "device_s": 4.0,
    }  # fmt: skip
    step = {"trained_tokens": 7, "flops": 100.0, "device_s": 0.5}
    monkeypatch.setattr(compute, "iteration_totals", lambda *given: totals)
    monkeypatch.setattr(compute, "step_totals", lambda *given: step)


Fit = Callable[..., Trainer]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Fit a fake module for `batches` batches; a batch is nothing but a number."""

    def run(
        module: LightningModule, callbacks: list[Callback], loggers: list[Logger], *, batches: int,
        ckpt_path: Path | None = None, **options: Any,
    ) -> Trainer:  # fmt: skip
        torch.manual_seed(0)
        defaults: dict[str, Any] = {"enable_progress_bar": False, "num_sanity_val_steps": 0}
        trainer = Trainer(
            accelerator="cpu", max_epochs=1, logger=loggers, callbacks=callbacks,
            default_root_dir=tmp_path, enable_checkpointing=False, enable_model_summary=False,
            **{**defaults, **options},
        )  # fmt: skip
        data = DataLoader(list(range(batches)))
        trainer.fit(module, data, DataLoader(list(range(2))), ckpt_path=ckpt_path)
        return trainer

    return run
