"""The diagnosis of a run of PPO while it goes on: each rule of RULES is applied to its metrics.

Where several rules apply in the same iteration, the order of RULES is the order of their findings:
data, reward, sampling, policy update, critic, outcome. A fault of one kind shows in the metrics of
the kinds behind it, seldom the other way round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rlhf.callbacks.contract import is_evaluation, ppo_view
from lightning_rlhf.callbacks.loggers import RunWandb
from lightning_rlhf.callbacks.rules import (
    IN_A_ROW,
    History,
    Row,
    Rule,
    groups_alike,
    kl_negative,
    length_extreme,
    nothing_ends,
    prompts_cut,
    responses_identical,
    responses_repeat,
    reward_against_gold,
    reward_against_perplexity,
    reward_constant,
    reward_flat,
    rule,
)
from lightning_rlhf.core.errors import ConfigError, own_keys
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.io.user_code import FAULTS, load_object

ENTROPY = 0.01
"""Nats a token: the most likely token then has a probability above 0.998 on average."""
RATIO = 10.0
"""Probability ratio of a token, as `update/ratio_max` in METRICS; clipping does not bound the
gradient of tokens with a negative advantage."""
CLIPPED, CLIPPED_FOR = 0.4, 5
"""Share of tokens outside ppo.clip_range, mean over so many iterations; healthy is below 0.3."""
UNMOVED_FOR = 10
"""Consecutive iterations without one clipped token."""
UNMOVED_TOKENS = 3000
"""Tokens of all epochs of these iterations, at least: of a clipped share above 0.1%, so many tokens
show one with 95% probability (3 / n, Hanley and Lippman-Hand 1983)."""
CRITIC_FOR, CRITIC_ERRORS = 20, 2.0
"""Iterations over which the explained variance is averaged, and standard errors below 0."""
CRITIC_AT_MOST = -0.1
"""Mean explained variance: a tenth more squared error than a constant. A new critic is near 0."""
RISE, RISE_FOR = 3.0, 10
"""Factor between the medians of the value loss in so many iterations and in as many before."""


@rule(
    when="kl_divergence > ppo.kl_warning",
    cause="so far from the SFT model a reward says little",
    remedy="Look at samples/; a smaller ppo.lr, or a larger ppo.kl_coef, keeps the policy near",
)
def kl_exploding(history: History) -> str | None:
    limit, kl = history.config.kl_warning, history.last("kl_divergence", 1)
    if limit is None or not kl or not kl[0] > limit:
        return None
    return (
        f"kl_divergence is {kl[0]:.4g} nats a response in iteration "
        f"{history.rows[-1]['step']:.0f}, above ppo.kl_warning={limit:g}"
    )


@rule(
    when=f"entropy < {ENTROPY:g} nats a token in {IN_A_ROW} iterations in a row",
    cause="the policy nearly always picks the same token, so that nothing new is tried: the steps "
    "are too large, or the temperature too low",
    remedy="a smaller ppo.lr, a larger ppo.kl_coef or ppo.ent_coef, a larger ppo.temperature",
)
def entropy_collapse(history: History) -> str | None:
    if not history.lasts("entropy", lambda x: x < ENTROPY, IN_A_ROW):
        return None
    return (
        f"entropy is {history.rows[-1]['entropy']:.3g} nats a token, below {ENTROPY:g} {IN_A_ROW} "
        "iterations in a row"
    )


@rule(
    when=f"update/ratio_max > {RATIO:g} in {IN_A_ROW} iterations in a row",
    cause="single tokens became many times as likely within an iteration: the steps are too large, "
    "or sampling and training compute different log-probabilities",
    remedy="a smaller ppo.lr or ppo.ppo_epochs, ppo.target_kl=0.02, ppo.dual_clip=3",
)
def ratio_outliers(history: History) -> str | None:
    name = "update/ratio_max"
    if not history.lasts(name, lambda x: x > RATIO, IN_A_ROW):
        return None
    return f"{name} is {history.rows[-1][name]:.3g}, above {RATIO:g} {IN_A_ROW} iterations in a row"


@rule(
    when=f"update/clip_fraction > {CLIPPED:g} on average over {CLIPPED_FOR} iterations",
    cause="the policy moves further in an iteration than the clipped loss can follow",
    remedy="a smaller ppo.lr or ppo.ppo_epochs, a larger ppo.minibatch_size, ppo.target_kl=0.02",
)
def clip_fraction_high(history: History) -> str | None:
    found = history.last("update/clip_fraction", CLIPPED_FOR)
    if not found or not fmean(found) > CLIPPED:
        return None
    return (
        f"update/clip_fraction is {fmean(found):.3g} on average over {CLIPPED_FOR} iterations, "
        f"above {CLIPPED:g}"
    )


@rule(
    when=f"update/clip_fraction is 0 in {UNMOVED_FOR} iterations in a row, in which the policy "
    f"learns from {UNMOVED_TOKENS} tokens or more, in several steps and at half of ppo.lr or more",
    cause="the policy hardly moves: the steps are too small, or the clip range is so wide that "
    "nothing is clipped",
    remedy="a larger ppo.lr, a ppo.clip_range near 0.2, more ppo.ppo_epochs",
)
def clip_fraction_zero(history: History) -> str | None:
    config, rows = history.config, history.rows[-UNMOVED_FOR:]
    still = (
        history.lasts("update/clip_fraction", lambda x: x == 0.0, UNMOVED_FOR)
        and history.lasts("update/steps", lambda x: x > 1.0, UNMOVED_FOR)
        and history.lasts("update/lr", lambda x: x >= config.lr / 2, UNMOVED_FOR)
    )
    if not still or rows[0]["step"] <= config.critic_warmup:
        return None
    lengths = history.last("rollout/response_tokens", UNMOVED_FOR)
    if sum(lengths) * config.rollout_batch_size * config.ppo_epochs < UNMOVED_TOKENS:
        return None
    return (
        f"update/clip_fraction is 0 {UNMOVED_FOR} iterations in a row (ppo.clip_range="
        f"{config.clip_range:g}, update/lr={rows[-1]['update/lr']:.3g})"
    )


@rule(
    when=f"rollout/explained_variance over {CRITIC_FOR} iterations is below {CRITIC_AT_MOST:g} on "
    f"average, and below 0 by more than {CRITIC_ERRORS:g} standard errors",
    cause="the critic predicts returns worse than their mean would, so that it adds noise to the "
    "advantages: its learning rate is too high, or its targets move too fast",
    remedy="a smaller ppo.value_lr_factor, ppo.critic_warmup, ppo.advantage=rloo without a critic",
)
def critic_worse(history: History) -> str | None:
    found = history.last("rollout/explained_variance", CRITIC_FOR)
    found = [x for x in found if math.isfinite(x)]
    if len(found) < CRITIC_FOR:
        return None
    mean, error = fmean(found), stdev(found) / math.sqrt(len(found))
    if mean >= CRITIC_AT_MOST or mean + CRITIC_ERRORS * error >= 0.0:
        return None
    return (
        f"rollout/explained_variance is {mean:.3g} on average over {CRITIC_FOR} iterations, with a "
        f"standard error of {error:.2g}"
    )


@rule(
    when=f"the median of update/value_loss over {RISE_FOR} iterations is above {RISE:g} times that "
    f"of the {RISE_FOR} before, and each of them is above it",
    cause="the critic diverges, or returns grow faster than ppo.clip_range_vf lets it follow",
    remedy="a smaller ppo.value_lr_factor or ppo.vf_coef, ppo.score_normalization=running, "
    "ppo.clip_range_vf=null",
)
def value_loss_rising(history: History) -> str | None:
    found = history.last("update/value_loss", 2 * RISE_FOR)
    if not found or history.config.advantage != "gae":
        return None
    before, now = median(found[:RISE_FOR]), median(found[RISE_FOR:])
    if not (now > RISE * before and min(found[RISE_FOR:]) > before):
        return None
    return (
        f"update/value_loss rose from {before:.3g} to {now:.3g} (medians of {RISE_FOR} iterations)"
    )


RULES: tuple[Rule, ...] = (
    prompts_cut,
    groups_alike,
    reward_constant,
    nothing_ends,
    length_extreme,
    kl_negative,
    kl_exploding,
    entropy_collapse,
    ratio_outliers,
    clip_fraction_high,
    clip_fraction_zero,
    responses_identical,
    responses_repeat,
    critic_worse,
    value_loss_rising,
    reward_flat,
    reward_against_gold,
    reward_against_perplexity,
)
"""All rules, in the order of precedence."""


def rules_table() -> str:
    """Return RULES as a Markdown table."""
    lines = ["| rule | applies when | likely cause | what to do |", "|---|---|---|---|"]
    lines += [f"| `{r.name}` | {r.when} | {r.cause} | {r.remedy} |" for r in RULES]
    return "\n".join(lines)


DIAGNOSIS = "diagnosis.json"
"""Name of the file of findings in the folder of a run."""
KEPT = 100
"""Number of iterations, and of evaluations, whose metrics are kept for the rules."""
UNREAD = ("eval/", "time/", "compute/")
"""Prefixes of metrics that are not kept in the rows of iterations."""


class Diagnosis(Callback):
    """Callback that reports each symptom of a fault once per run, with its cause and a remedy.

    A finding is one line on the console, an entry of `<run_dir>/diagnosis.json` and an alert of
    W&B. Place this callback after those that measure, and before Checkpoints, so that a resumed run
    repeats no finding.
    """

    def __init__(
        self,
        config: PPOConfig,
        run_dir: Path,
        *,
        prompts_cut: float = 0.0,
        stage: str = "ppo",
        rules: Sequence[Rule] = RULES,
    ) -> None:
        """Set the rules and the facts that they read besides metrics.

        prompts_cut: share of the training prompts that were cut, or left out, for their length.
        stage: name of the section of `config`, whose keys the findings name.
        rules: rules in their order of precedence.
        """
        self.stage = stage
        self.config = config
        self.path = run_dir / DIAGNOSIS
        self.prompts_cut = prompts_cut
        self.rules = rules
        self.rows: list[Row] = []
        """Metrics of the latest iterations."""
        self.evaluations: list[Row] = []
        """Metrics of the latest evaluations."""
        self.reported: list[str] = []
        """Names of the rules that were reported."""
        self.findings: list[dict[str, Any]] = []
        """Entries of the file: rule, iteration, symptom, cause, remedy."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [dict(row) for row in self.rows],
            "evaluations": [dict(row) for row in self.evaluations],
            "reported": list(self.reported),
            "findings": list(self.findings),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reported = list(state_dict["reported"])
        self.rows, self.evaluations = list(state_dict["rows"]), list(state_dict["evaluations"])
        self.findings = list(state_dict["findings"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write()  # without the findings behind the checkpoint that a run goes on from

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        found = {n: x for n, x in measured(trainer).items() if not n.startswith(UNREAD)}
        self.rows = [*self.rows, found | {"step": ppo_view(pl_module).iteration}][-KEPT:]
        self.diagnose(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_evaluation(trainer):
            return
        found = {n: x for n, x in measured(trainer).items() if n.startswith("eval/")}
        step = ppo_view(pl_module).iteration
        before = [row for row in self.evaluations if row["step"] != step]
        self.evaluations = [*before, found | {"step": step}][-KEPT:]
        self.diagnose(trainer, pl_module)

    def diagnose(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the rules that were not reported yet, and report those that find a symptom."""
        history = History(
            rows=self.rows,
            evaluations=self.evaluations,
            config=self.config,
            prompts_cut=self.prompts_cut,
        )
        for each in self.rules:
            if each.name in self.reported or (symptom := applied(each, history)) is None:
                continue
            self.reported.append(each.name)
            found = {"symptom": symptom, "cause": each.cause, "remedy": each.remedy}
            keys = vars(self.config)
            found = {name: own_keys(text, self.stage, keys) for name, text in found.items()}
            iteration = ppo_view(pl_module).iteration
            self.findings.append({"rule": each.name, "iteration": iteration, **found})
            text = "{symptom}: {cause}. {remedy}".format(**found)
            print_line(f"warning: {text}", "yellow")
            self.write()
            for logger in trainer.loggers:
                if isinstance(logger, RunWandb):
                    logger.alert(each.name, text)

    def write(self) -> None:
        """Write all findings to the file."""
        with written_whole(self.path) as beside:
            beside.write_text(json.dumps(self.findings, indent=2) + "\n", encoding="utf-8")


def applied(rule: Rule, history: History) -> str | None:
    """Return the symptom that a rule finds, or None; raises ConfigError where the rule fails."""
    try:
        return rule.find(history)
    except FAULTS as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the rule {rule.name!r} of the diagnosis raised {shown} on {len(history.rows)} "
            f"iterations and {len(history.evaluations)} evaluations; allowed: to return the "
            "symptom as text, or None"
        ) from error


class OwnRule(Callback):
    """Callback that adds a rule of the user's own to those of the diagnosis, behind them."""

    def __init__(self, rule: str) -> None:
        """Load the rule `path/to/file.py:name` or `package.module:name`.

        Raises ConfigError where `rule` does not lead to a Rule.
        """
        self.rule: Rule = load_object(rule, "rule", "rule", lambda found: isinstance(found, Rule))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Diagnosis) and self.rule not in callback.rules:
                callback.rules = (*callback.rules, self.rule)


def measured(trainer: Trainer) -> dict[str, float]:
    """Return the latest value of every metric that a callback may monitor."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
