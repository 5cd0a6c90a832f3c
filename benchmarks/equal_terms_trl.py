"""Train TRL's PPO for equal_terms.py; evaluate its policy on held-out prompts by our code.

    python benchmarks/equal_terms_trl.py FOLDER LR VALUE_LR_FACTOR stage=ppo OVERRIDE ...

It gets what stage=ppo with these overrides gets: the SFT model, the prompts of all iterations, the
reward, the price of responses that do not end, and the values of all hyperparameters that both
have. Policy and value model are adapters of the same rank as ours, or train all weights where ours
does. FOLDER gets a metrics.csv.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lightning_rlhf
import trl_peer
from common import Iteration, Setting, calm
from equal_terms import KL_COEF, PROCESSOR_S
from lightning_rlhf.callbacks.evaluation import evaluation_metrics, judged_samples
from lightning_rlhf.callbacks.loggers import MetricsFile
from lightning_rlhf.core import masking, shaping
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.data.batches import pad
from lightning_rlhf.library import Training
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.rollout.collector import decode_responses

SAME = ("iterations", "kl_coef", "gamma", "gae_lambda", "clip_range", "clip_range_vf", "vf_coef",
        "temperature", "lr_schedule", "warmup_fraction", "adam_beta2", "adam_eps")  # fmt: skip
"""Hyperparameters that have the same names on both sides."""


class Peer:
    """The reward of TRL's trainer, and the evaluations of its policy."""

    def __init__(self, training: Training, trained: nn.Module, folder: Path) -> None:
        """training: ours, whose policy takes over the weights of `trained` for an evaluation."""
        self.module: Any = training.module
        self.judge = training.stage.evaluation.judge  # type: ignore[attr-defined]
        self.trained, self.file = trained, MetricsFile(folder)
        self.val = list(training.data.val_dataloader())
        self.index = {tuple(one.prompt): one.index for one in training.data.train}
        self.rows: list[dict[str, float]] = [self.evaluation()]

    @torch.no_grad()
    def score(self, tokens: Tensor, response_mask: Tensor) -> Tensor:
        """Return our reward of responses, less the price of those that do not end.

        tokens: prompts with responses, 0 on padding, with which no prompt begins.
        """
        width, collector = tokens.shape[1] - response_mask.shape[1], self.module.collector
        prompt_mask = (tokens[:, :width] != 0).cumsum(dim=1) > 0
        prompts = masking.real_tokens(tokens[:, :width], prompt_mask)
        ends = torch.tensor(collector.chat.end_token_ids)
        ended = (torch.isin(tokens[:, width:], ends) & response_mask).any(dim=1)
        index = torch.tensor([self.index[tuple(prompt)] for prompt in prompts])
        rollout = SampledResponses(
            tokens=tokens, mask=torch.cat([prompt_mask, response_mask], dim=1), ended=ended,
            response_mask=response_mask, logprobs=None, values=None, index=index,
        )  # fmt: skip
        components, _ = collector.reward(
            decode_responses(rollout, collector.prompts["train"], collector.chat)
        )
        score = shaping.weighted_sum(components, collector.reward.terms)
        rule = self.module.config.missing_eos, self.module.config.missing_eos_penalty
        return shaping.apply_missing_eos(score, ended, *rule)

    @torch.no_grad()
    def evaluation(self) -> dict[str, float]:
        """Return the metrics of our policy on held-out prompts, as those of our evaluations."""
        samples = []
        for number, prompts in enumerate(self.val):
            result = self.module.validation_step(prompts, number)
            samples += judged_samples(result, self.module.collector.reward, self.judge)
        return evaluation_metrics(samples)

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the trained weights to our policy. Raises KeyError unless both have the same."""
        theirs = {n: x for n, x in self.trained.named_parameters() if x.requires_grad}
        for name, parameter in self.module.roles.model.named_parameters():
            if parameter.requires_grad:
                short = name.removeprefix("base_model.model.").replace(f".{POLICY}.", ".default.")
                parameter.copy_(theirs.pop(short))
        if theirs:
            raise KeyError(", ".join(theirs))

    def finish(self, measured: Iteration) -> None:
        """Record an iteration, with an evaluation where stage=ppo has one."""
        row = {PROCESSOR_S: measured.processor_seconds, KL_COEF: self.module.config.kl_coef}
        number, config = len(self.rows), self.module.config
        if number % config.val_every == 0 or number == config.iterations:
            self.take_over()
            row |= self.evaluation()
        self.rows.append(row)

    def write(self) -> None:
        """Write metrics.csv."""
        self.file.path.parent.mkdir(parents=True, exist_ok=True)
        for step, row in enumerate(self.rows):
            self.file.log_metrics(row, step=step)


def prompts_of(training: Training, width: int) -> list[Prompts]:
    """Return the prompts of all iterations of ours, all as long as the longest one."""
    found = []
    for batch in training.data.train_dataloader():
        rows = masking.real_tokens(batch.tokens, batch.mask)
        tokens, mask = pad([[0] * width, *rows], 0, "left")
        mask = torch.cat([mask[:1], torch.arange(width) >= width - batch.mask.sum(1, True)])
        found.append(Prompts(tokens=tokens[1:], mask=mask[1:], index=batch.index))
    return found


def main() -> None:
    folder, lr, factor, _, *overrides = sys.argv[1:]  # without stage=ppo
    settings = lightning_rlhf.configuration("ppo", *overrides)
    training = lightning_rlhf.build(settings)
    config: Any = settings.config
    calm()
    model = AutoModelForCausalLM.from_pretrained(
        settings.outputs / settings.run / settings.model.name / "sft" / "final", dtype=torch.float32
    )
    peer = Peer(training, model, Path(folder))
    (end,) = peer.module.chat.end_token_ids
    setting = Setting(
        episodes=config.rollout_batch_size, response_tokens=config.max_response_tokens,
        end_token=end, score=peer.score, lr=float(lr), value_lr_factor=float(factor),
        epochs=config.ppo_epochs, minibatches=config.rollout_batch_size // config.minibatch_size,
        lora_rank=settings.model.lora.r, seed=settings.seed,
        **{name: getattr(config, name) for name in SAME},
    )  # fmt: skip
    width = max(one.length for one in training.data.train)
    trains: trl_peer.Trained = "all" if config.finetune == "full" else "lora"
    with patch.object(gc, "collect"):  # TRL calls it twice an iteration, over our modules as well
        trl_peer.train(
            model, setting, prompts_of(training, width), peer.finish, policy=trains, value=trains
        )
    peer.write()


if __name__ == "__main__":
    main()
