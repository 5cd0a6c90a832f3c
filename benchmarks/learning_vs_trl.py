"""Compare the learning curves of our PPO and TRL's, with the same trained parameters.

    python benchmarks/learning_vs_trl.py [--sides ours trl] [--seeds 0 1 2] [--out FOLDER]

The model is pretrained for a few seconds to continue a random Markov chain. The score is in [0, 1]:
half of it is the share of response tokens from a quarter of the vocabulary, the other half is
given where the response contains the last token of its prompt.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import ours
import trl_peer
from common import Iteration, Setting, calm, circumstances, markdown_table
from lightning_rlhf.core.records import Prompts

VOCABULARY, END = 64, 0
WANTED = 16  # tokens 1 to 16 are the quarter that is rewarded
SHORTEST, LONGEST, RESPONSE = 3, 6, 16
END_CHANCE = 0.08
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
KL_COEF = 0.01  # penalty per nat: a hundredth of the score's range
VALUE_FACTORS = (1.0, 10.0)
TUNING_SEED = 100
SMOOTH = 8  # number of iterations averaged in each point of a curve
FRESH = 1024  # number of held-out prompts
COLOURS = {"ours": "#1f6fb4", "ours-critic": "#64b0e6", "trl": "#d1662a", "trl-value": "#e8a87c"}

Train = Callable[..., nn.Module]
SIDES: Mapping[str, Train] = {
    "ours": partial(ours.train, critic="head"),
    "ours-critic": partial(ours.train, critic="adapter"),
    "trl": partial(trl_peer.train, policy="lora", value="lora"),
    "trl-value": partial(trl_peer.train, policy="lora", value="all"),
}
WORDS = {
    "ours": "value head on the policy's trunk (the default)",
    "ours-critic": "critic with an adapter and a head of its own (`ppo.critic=adapter`)",
    "trl": "value model with an adapter and a head of its own",
    "trl-value": "value model of which all weights are trained (what TRL does by itself)",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one training."""

    side: str
    """Name of the implementation, a key of SIDES."""
    seed: int
    """Random seed."""
    lr: float
    """Learning rate of the policy."""
    value_lr_factor: float
    """Ratio of the critic's learning rate to the policy's."""
    iterations: list[Iteration]
    """Measurements of all iterations."""
    fresh_score: float
    """Mean score of the trained policy on held-out prompts."""
    fresh_kl: float
    """Mean KL of the trained policy to the reference on held-out prompts, nats per response."""

    def last(self, fact: str) -> float:
        """Return the mean of a measurement over the last eighth of the iterations."""
        values = [getattr(i, fact) for i in self.iterations]
        return statistics.mean(values[-max(1, len(values) // 8) :])

    def shaped(self, kl_coef: float) -> float:
        """Return the objective of PPO, score - kl_coef * KL, at the end of the training."""
        return self.last("score") - kl_coef * self.last("kl")

    def facts(self, kl_coef: float) -> dict[str, Any]:
        """Return all fields but the iterations, with the measurements at the end."""
        own = {name: value for name, value in vars(self).items() if name != "iterations"}
        ends = {"score": self.last("score"), "kl": self.last("kl")}
        return own | ends | {"score_less_price_of_kl": self.shaped(kl_coef)}

    def curves(self) -> dict[str, list[float]]:
        """Return the measurements of each iteration, rounded to 4 decimals."""
        names = ("score", "kl", "response_tokens")
        return {f"{n}_of_iterations": [round(getattr(i, n), 4) for i in self.iterations]
                for n in names}  # fmt: skip

    def curve(self, fact: str) -> np.ndarray:
        """Return a measurement as a moving average over SMOOTH iterations."""
        values = [getattr(i, fact) for i in self.iterations]
        return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")

    def score_at(self, kl: np.ndarray) -> np.ndarray:
        """Return the score at given values of KL, interpolated along the curve sorted by KL."""
        found = self.curve("kl")
        order = np.argsort(found)
        return np.interp(kl, found[order], self.curve("score")[order])


def score(tokens: Tensor, response_mask: Tensor) -> Tensor:
    """Return 0.5 * share of wanted tokens + 0.5 where the response has the prompt's last token."""
    responses = tokens[:, -response_mask.shape[1] :]
    asked = tokens[:, -response_mask.shape[1] - 1, None]
    wanted = (responses >= 1) & (responses <= WANTED) & response_mask
    said = ((responses == asked) & response_mask).any(dim=1)
    return 0.5 * wanted.sum(dim=1) / response_mask.sum(dim=1) + 0.5 * said


class Chain:
    """A random Markov chain over the tokens from 1 on, each with a few likely successors."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(VOCABULARY, VOCABULARY - 1, generator=generator)
        self.successors = torch.softmax(logits, dim=-1)

    def sample(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(1, VOCABULARY, (rows, 1), generator=generator)
        for _ in range(length - 1):
            chances = self.successors[tokens[:, -1]]
            following = 1 + torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens

    def prompts(self, batches: int, rows: int, seed: int) -> list[Prompts]:
        """Return batches of left-padded prompts of uneven length."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(batches):
            tokens = self.sample(rows, LONGEST, generator)
            lengths = torch.randint(SHORTEST, LONGEST + 1, (rows, 1), generator=generator)
            mask = torch.arange(LONGEST) >= LONGEST - lengths
            tokens = tokens.where(mask, 0)
            found.append(Prompts(tokens=tokens, mask=mask, index=torch.arange(rows)))
        return found


def pretrained(chain: Chain, seed: int, steps: int = 400) -> PreTrainedModel:
    """Return the reference model: a small model trained on the chain and on random ends."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = chain.sample(64, LONGEST + RESPONSE, generator)
        ends = torch.rand(tokens.shape, generator=generator) < END_CHANCE
        ends[:, :SHORTEST] = False
        after = (ends.long().cumsum(1) - ends.long()) > 0
        tokens = tokens.masked_fill(ends, END)
        labels = tokens.masked_fill(after, -100)
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def fresh(policy: nn.Module, reference: PreTrainedModel, prompts: Prompts) -> tuple[float, float]:
    """Return mean score and mean KL to the reference of new samples, by the same code for all
    sides."""
    policy.eval()
    torch.manual_seed(0)
    tokens = policy.generate(
        input_ids=prompts.tokens,
        attention_mask=prompts.mask.long(),
        max_new_tokens=RESPONSE,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=END,
        pad_token_id=END,
    )
    responses = tokens[:, LONGEST:]
    ended = responses == END
    response_mask = (ended.long().cumsum(1) - ended.long()) == 0
    mask = torch.cat([prompts.mask, response_mask], dim=1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    logprobs = []
    for model in (policy, reference):
        logits = model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions).logits[
            :, LONGEST - 1 : -1
        ]
        chosen = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)
        logprobs.append(torch.where(response_mask, chosen, 0).sum(dim=1))
    kl = (logprobs[0] - logprobs[1]).mean().item()
    return score(tokens, response_mask).mean().item(), kl


def run(side: str, setting: Setting, chain: Chain, reference: PreTrainedModel) -> Run:
    """Run one training from the reference, and evaluate its policy on held-out prompts."""
    prompts = chain.prompts(setting.iterations, setting.episodes, seed=1000 + setting.seed)
    held_out = chain.prompts(1, FRESH, seed=999)[0]
    iterations: list[Iteration] = []
    started = time.perf_counter()
    with patch.object(gc, "collect"):  # TRL calls it twice per iteration
        policy = SIDES[side](copy.deepcopy(reference), setting, prompts, iterations.append)
    fresh_score, fresh_kl = fresh(policy, reference, held_out)
    found = Run(
        side=side,
        seed=setting.seed,
        lr=setting.lr,
        value_lr_factor=setting.value_lr_factor,
        iterations=iterations,
        fresh_score=fresh_score,
        fresh_kl=fresh_kl,
    )
    print(
        f"{side:12} seed {setting.seed:3} lr {setting.lr:g} x{setting.value_lr_factor:g}: score "
        f"{found.last('score'):.3f} KL {found.last('kl'):.2f} return "
        f"{found.shaped(setting.kl_coef):.3f}; fresh {fresh_score:.3f} {fresh_kl:.2f}; "
        f"{time.perf_counter() - started:.0f} s",
        flush=True,
    )
    return found


def tuned(
    side: str,
    setting: Setting,
    chain: Chain,
    reference: PreTrainedModel,
    grid: tuple[Sequence[float], Sequence[float]],
) -> tuple[Setting, list[Run]]:
    """Return the setting with the grid's best learning rates, and all runs of the grid.

    The best ones have the largest score - kl_coef * KL at the end, on the seed TUNING_SEED.
    """
    tried = [
        run(
            side,
            replace(setting, lr=lr, value_lr_factor=factor, seed=TUNING_SEED),
            chain,
            reference,
        )
        for lr, factor in itertools.product(*grid)
    ]
    best = max(tried, key=lambda r: r.shaped(setting.kl_coef))
    return replace(setting, lr=best.lr, value_lr_factor=best.value_lr_factor), tried


def common_kl(runs: Sequence[Run]) -> np.ndarray:
    """Return five values of KL within the range of every run."""
    lowest = max(run.curve("kl").min() for run in runs)
    highest = min(run.curve("kl").max() for run in runs)
    return np.linspace(lowest, highest, 5)


def seeds_table(runs: Sequence[Run], kl_coef: float) -> str:
    header = ["side", "seed", "score at the end", "KL at the end", "score - kl_coef KL",
              "score, fresh samples", "KL, fresh samples"]  # fmt: skip
    rows = [
        [
            run.side,
            str(run.seed),
            f"{run.last('score'):.3f}",
            f"{run.last('kl'):.2f}",
            f"{run.shaped(kl_coef):.3f}",
            f"{run.fresh_score:.3f}",
            f"{run.fresh_kl:.2f}",
        ]
        for run in runs
    ]
    return markdown_table(header, rows)


def equal_kl_table(runs: Sequence[Run], sides: Sequence[str]) -> str:
    grid = common_kl(runs)
    header = ["score at a KL of", *(f"{kl:.2f}" for kl in grid), "mean"]
    rows = []
    for side in sides:
        scores = np.stack([run.score_at(grid) for run in runs if run.side == side])
        scores = np.column_stack([scores, scores.mean(axis=1)])
        cells = zip(scores.mean(0), scores.min(0), scores.max(0), strict=True)
        rows.append([side, *(f"{m:.3f} [{low:.3f}-{high:.3f}]" for m, low, high in cells)])
    return markdown_table(header, rows)


def draw(runs: Sequence[Run], sides: Sequence[str], episodes: int, path: Path) -> None:
    """Plot score against KL, and score and KL against episodes, with one line per seed."""
    figure = Figure(figsize=(12.8, 4.2), layout="constrained")
    against_kl, over_time, kl_over_time = figure.subplots(1, 3)
    for run in runs:
        look = {"color": COLOURS[run.side], "linewidth": 1.3}
        episode = episodes * (np.arange(len(run.curve("kl"))) + SMOOTH)
        against_kl.plot(run.curve("kl"), run.curve("score"), **look)
        over_time.plot(episode, run.curve("score"), **look)
        kl_over_time.plot(episode, run.curve("kl"), **look)
    for axes, x, y in (
        (against_kl, "KL to the reference, nats a response", "score"),
        (over_time, "episodes", "score"),
        (kl_over_time, "episodes", "KL to the reference, nats a response"),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
    for side in sides:
        against_kl.plot([], [], color=COLOURS[side], label=side)
    against_kl.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def report(
    runs: Sequence[Run],
    grids: Mapping[str, Sequence[Run]],
    setting: Setting,
    facts: Mapping[str, str],
    start: tuple[float, float],
) -> str:
    sides = list(grids)
    chosen = {side: next(run for run in runs if run.side == side) for side in sides}
    episodes = setting.iterations * setting.episodes
    names = "\n".join(
        f"- {side}: {WORDS[side]}; lr {chosen[side].lr:g}, "
        f"critic's {chosen[side].value_lr_factor:g} times that."
        for side in sides
    )
    lines = [
        "# What PPO learns, ours and TRL's",
        f"{facts['date']}, commit {facts['commit']}; {facts['machine']}; {facts['versions']}.",
        f"Every run: {episodes} episodes in {setting.iterations} iterations, {setting.epochs} "
        f"epochs of {setting.minibatches} minibatches, kl_coef {setting.kl_coef:g}, gamma "
        f"{setting.gamma:g}, lambda {setting.gae_lambda:g}, clip {setting.clip_range:g}, Adam "
        f"(0.9, {setting.adam_beta2:g}, {setting.adam_eps:g}) with a learning rate that falls "
        f"linearly to 0, a policy adapter of rank {setting.lora_rank}. Each side has the learning "
        f"rates that had the largest score - kl_coef KL at the end on seed {TUNING_SEED}, of "
        "the grid below (the critic's factor multiplies its own rate). The end is the last eighth "
        f"of the iterations. Fresh samples: {FRESH} held-out prompts, the same code for all sides. "
        f"The reference scores {start[0]:.3f}. Ours clips the gradient at norm 1; TRL's trainer "
        "does not clip it.",
        names,
        seeds_table(runs, setting.kl_coef),
        "Score at equal KL: each run's score interpolated along its own curve (means of "
        f"{SMOOTH} iterations); mean over seeds [smallest-largest]. A smaller learning rate gets "
        "more score for a nat on either side, so that this table compares the sides together with "
        "their rates.",
        equal_kl_table(runs, sides),
        "![score against KL](learning_vs_trl.png)",
        "The grid:",
        seeds_grid(grids, setting.kl_coef),
    ]
    return "\n\n".join(lines) + "\n"


def seeds_grid(grids: Mapping[str, Sequence[Run]], kl_coef: float) -> str:
    header = ["side", "lr", "critic's factor", "score", "KL", "score - kl_coef KL"]
    rows = [
        [
            side,
            f"{run.lr:g}",
            f"{run.value_lr_factor:g}",
            f"{run.last('score'):.3f}",
            f"{run.last('kl'):.2f}",
            f"{run.shaped(kl_coef):.3f}",
        ]
        for side, tried in grids.items()
        for run in tried
    ]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours", "trl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--value-factors", type=float, nargs="+", default=VALUE_FACTORS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    calm()
    facts = circumstances()
    chain = Chain(seed=0)
    reference = pretrained(chain, seed=0)
    start = fresh(reference, reference, chain.prompts(1, FRESH, seed=999)[0])
    setting = Setting(
        iterations=args.iterations,
        episodes=64,
        response_tokens=RESPONSE,
        end_token=END,
        score=score,
        lr=RATES[0],
        kl_coef=KL_COEF,
        epochs=2,
        lora_rank=8,
    )
    grids: dict[str, list[Run]] = {}
    runs: list[Run] = []
    for side in args.sides:
        best, grids[side] = tuned(side, setting, chain, reference, (args.rates, args.value_factors))
        runs += [run(side, replace(best, seed=seed), chain, reference) for seed in args.seeds]
    args.out.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Any] = dict(facts) | {
        "reference_score": start[0],
        "runs": [run.facts(setting.kl_coef) | run.curves() for run in runs],
        "grid": [run.facts(setting.kl_coef) for tried in grids.values() for run in tried],
    }
    (args.out / "learning_vs_trl.json").write_text(json.dumps(everything) + "\n")
    draw(runs, args.sides, setting.episodes, args.out / "learning_vs_trl.png")
    text = report(runs, grids, setting, facts, start)
    (args.out / "learning_vs_trl.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
