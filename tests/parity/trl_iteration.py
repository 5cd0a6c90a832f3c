"""One iteration of TRL's PPOTrainer on four tiny models, and every tensor that it computed.

The trainer's arithmetic stands inside `PPOTrainer.train`, so it is run, not called: what it hands
to its logger and to `accelerator.backward` is looked at from there, in the frame of `train`.
"""

import functools
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    set_seed,
)

from lightning_rlhf.core.records import Rollout, Scores

VOCABULARY = 11
PAD = VOCABULARY  # no token the policy could sample
EOS, STOP = 1, 2
PROMPT_LENGTH, RESPONSE_LENGTH = 3, 8
MICROBATCH, ACCUMULATION = 6, 4
BATCH = MICROBATCH * ACCUMULATION
PENALTY = 1.5
POLICY_SEED = 29  # of a policy whose responses end early, at the last position, and not at all


@dataclass(frozen=True)
class Iteration:
    """What TRL computed, by the names of its own variables."""

    batch: Mapping[str, Any]
    """Variables of `train` when the iteration is logged."""
    microbatches: list[list[Mapping[str, Tensor]]]
    """Of each epoch, the variables at each backward pass; `d_x` is the loss's gradient in x."""
    whitened: list[tuple[Tensor, Tensor]]
    """Input and output of each call of masked_whiten."""
    raw_score: Tensor
    """Of the reward model, before the penalty for a missing end token."""
    metrics: Mapping[str, float]
    optimizer_steps: int

    @property
    def mask(self) -> Tensor:
        """True on response tokens."""
        return ~self.batch["padding_mask"]

    @property
    def mask_p1(self) -> Tensor:
        """True on response tokens and on the first position after them."""
        return ~self.batch["padding_mask_p1"]

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(dim=1)

    @property
    def ended_early(self) -> Tensor:
        """True where there is a position after the response."""
        return self.lengths < self.mask.shape[1]

    @property
    def advantages(self) -> Tensor:
        """Before they were whitened."""
        return self.whitened[-1][0]

    def rollout(self) -> Rollout:
        """The same responses as a record of ours, 0 on padding."""
        tokens, mask = self.batch["query_responses"], self.mask
        prompt_mask = tokens[:, :PROMPT_LENGTH] != PAD
        return Rollout(
            tokens=tokens, mask=torch.cat([prompt_mask, mask], dim=1), response_mask=mask,
            ended=self.batch["contain_eos_token"],
            logprobs=torch.where(mask, self.batch["logprobs"].double(), 0),
            values=torch.where(mask, self.batch["values"], 0), index=torch.arange(len(tokens)),
        )  # fmt: skip

    def scores(self) -> Scores:
        ref_logprobs = torch.where(self.mask, self.batch["ref_logprobs"], 0)
        return Scores(
            component_scores=self.raw_score[:, None],
            score=self.raw_score,
            ref_logprobs=ref_logprobs,
        )

    def epoch(self, number: int, name: str) -> Tensor:
        """A variable of one epoch's micro-batches, in the order of the batch."""
        parts = self.microbatches[number]
        rows = torch.cat([part["micro_batch_inds"] for part in parts])
        return torch.cat([part[name] for part in parts])[rows.argsort()]


@dataclass
class Recorder:
    """Takes down what passes between `train` and the functions that it calls."""

    backwards: list[Mapping[str, Tensor]] = field(default_factory=list)
    whitened: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    raw_scores: list[Tensor] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def log(self, metrics: dict[str, float], *_: Any) -> None:
        self.batch = dict(sys._getframe(1).f_locals)
        self.metrics = dict(metrics)

    def backward(self, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        found = dict(sys._getframe(1).f_locals)
        inputs = [found["new_logprobs"], found["vpred"]]
        slopes = torch.autograd.grad(loss, inputs, retain_graph=True)
        kept = {name: x.detach().clone() for name, x in found.items() if isinstance(x, Tensor)}
        kept |= {"d_new_logprobs": slopes[0], "d_vpred": slopes[1]}
        kept["micro_batch_inds"] = torch.from_numpy(found["micro_batch_inds"])
        self.backwards.append(kept)
        backward(loss, **kwargs)

    def whiten(self, whiten: Any, values: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        result = whiten(values, mask, **kwargs)
        self.whitened.append((values.clone(), result.clone()))
        return result

    def get_reward(self, get_reward: Any, model: Any, *args: Any) -> tuple[Tensor, ...]:
        logits, score, lengths = get_reward(model, *args)
        self.raw_scores.append(score.clone())
        return logits, score, lengths


def tiny(kind: type[PreTrainedModel], seed: int) -> PreTrainedModel:
    """One layer in float64, with weights large enough for opinions."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    set_seed(seed)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompts(rows: int) -> list[list[int]]:
    """Of uneven length, left-padded."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (rows, PROMPT_LENGTH), generator=generator)
    tokens[::3, 0] = PAD
    return tokens.tolist()


@functools.cache
def trl_iteration(*, rows: int = 3 * BATCH, **settings: Any) -> Iteration:
    """One iteration with `settings` of trl's PPOConfig, over a data set of `rows` prompts."""
    recorder = Recorder()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        chosen = {"stop_token": "eos", "missing_eos_penalty": PENALTY} | settings
        config = trl_ppo.PPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, num_sample_generations=0, per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=ACCUMULATION, total_episodes=BATCH,
            response_length=RESPONSE_LENGTH, learning_rate=0.03, **chosen,
        )  # fmt: skip
        trainer = trl_ppo.PPOTrainer(
            config, SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
            tiny(LlamaForCausalLM, POLICY_SEED), tiny(LlamaForCausalLM, 2),
            tiny(LlamaForSequenceClassification, 3),
            Dataset.from_dict({"input_ids": prompts(rows)}),
            tiny(LlamaForSequenceClassification, 4),
            data_collator=lambda rows: {"input_ids": torch.tensor([r["input_ids"] for r in rows])},
        )  # fmt: skip
        steps: list[int] = []
        trainer.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for owner, name, seen in (
            (trainer.accelerator, "backward", recorder.backward),
            (trl_ppo, "masked_whiten", recorder.whiten),
            (trl_ppo, "get_reward", recorder.get_reward),
        ):
            wrapper = functools.partial(seen, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapper))
        stack.enter_context(patch.object(trainer, "log", recorder.log))
        set_seed(0)
        trainer.train()
    return Iteration(
        batch=recorder.batch,
        microbatches=[
            recorder.backwards[start : start + ACCUMULATION]
            for start in range(0, len(recorder.backwards), ACCUMULATION)
        ],
        whitened=recorder.whitened,
        raw_score=recorder.raw_scores[-1],
        metrics=recorder.metrics,
        optimizer_steps=len(steps),
    )
