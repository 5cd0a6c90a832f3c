"""The diagnosis of a run of PPO while it goes on: rules that are applied to its metrics.

Rules are in the order of data, reward, sampling, policy update, critic, outcome: a fault of one
kind shows in the metrics of the kinds behind it, seldom the other way round.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks import evaluation, files, progress
from lightning_rlhf.callbacks.loggers import RunWandb
from lightning_rlhf.core.errors import ConfigError, own_keys
from lightning_rlhf.core.metrics import GOLD, HELD_OUT, KL, REWARD
from lightning_rlhf.core.ppo_config import GROUPED, PPOConfig
from lightning_rlhf.io.console import print_line, visible_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.io.user_code import FAULTS, load_object

DIAGNOSIS = "diagnosis.json"
"""Name of the file of findings in the folder of a run."""
SHOWN, COUNT = ("groups_alike", "reward_constant"), 3
"""Rules whose finding shows responses of the iteration, and how many of them."""
KEPT = 100
"""Number of iterations, and of evaluations, whose metrics are kept for the rules."""
TOKENS, CLIP = "rollout/response_tokens", "update/clip_fraction"
STREAK = 3
"""Consecutive iterations in which a metric of a batch must be bad: a single one may be chance."""
IN_A_ROW = f"in {STREAK} iterations in a row"
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

Row = Mapping[str, float]
"""Metrics of one iteration by name."""


@dataclass
class History:
    """The recent past of a run of PPO."""

    config: PPOConfig
    run_dir: Path
    """Folder of the run, with the samples of the evaluations."""
    prompts_cut: float = 0.0
    """Share of the training prompts that were cut, or left out, for their length."""
    rows: list[Row] = field(default_factory=list)
    """Metrics of the latest iterations, oldest first; `step` is the number of the iteration."""
    evaluations: list[Row] = field(default_factory=list)
    """Metrics of the latest evaluations, oldest first; `step` as in `rows`."""

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric in the last `count` iterations; [] unless all of them have it."""
        found = [row[name] for row in self.rows[-count:] if name in row]
        return found if len(found) == count else []

    def streak(self, name: str, sign: str, bound: float) -> str | None:
        """Return the latest value of a metric that is beyond a bound STREAK times, or None.

        sign: relation to the bound, a key of COMPARE.
        """
        found = self.last(name, STREAK)
        holds = found and all(COMPARE[sign](x, bound) for x in found)
        return f"{found[-1]:.3g}" if holds else None


@dataclass(frozen=True)
class Rule:
    """A symptom of a fault in training, with its likely cause and a remedy."""

    name: str
    """Name of the rule."""
    when: str
    """Condition on which the rule applies, which with the numbers found is the symptom."""
    cause: str
    """Likely cause of the symptom."""
    remedy: str
    """Places to look at, and the keys of the configuration to change."""
    find: Callable[[History], str | None]
    """Function that returns the numbers found, or None where the condition does not hold."""


def rule(*, when: str, cause: str, remedy: str) -> Callable[[Any], Rule]:
    """Return a decorator that makes a rule of a function, under the function's name."""
    return lambda find: Rule(find.__name__, when, cause, remedy, find)


def rules_of(text: str, finders: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of a text like that of RULES; finders: functions of the rules by name."""
    rules = []
    for row in re.split(r"\n(?=\w)", text.strip()):
        name, when, cause, remedy = (" ".join(cell.split()) for cell in row.split("|"))
        find = finders.get(name)
        if find is None:  # the whole condition is a metric, a sign and a bound
            metric, sign, bound = when.removesuffix(f" {IN_A_ROW}").split()
            find = partial(History.streak, name=metric, sign=sign, bound=float(bound))
        rules.append(Rule(name, when, cause, remedy, find))
    return tuple(rules)


CUT = 0.1  # fewer prompts change no mean by much
ALIKE = 0.9  # a tenth of the batch is left
LEAST_ENDED = 0.05  # the scores are those of fragments
FULL, EMPTY = 0.95, 1.5  # of ppo.max_response_tokens, and tokens: an end token alone is one
SIGMAS, LEAST_KL = 4.0, 0.01
"""Standard errors below 0 of a KL that cannot be chance (1 in 30,000 iterations if normal), and
nats a response: rounding alone gives about 1e-6 (fp32) to 1e-2 (bf16)."""
LEAST_ENTROPY = 0.01  # the likeliest token then has more than 0.998
LARGEST_RATIO = 10  # clipping does not bound the gradient of tokens with a negative advantage
CLIPPED, CLIPPED_FOR = 0.4, 5  # mean over so many iterations; healthy is below 0.3
UNMOVED_FOR, UNMOVED_TOKENS = 10, 3000
"""Iterations without one clipped token, and tokens of all their epochs: of a clipped share above
0.1%, so many tokens show one with 95% probability (3 / n, Hanley and Lippman-Hand 1983)."""
COMMON = 0.5  # of the responses
REPEATED = 0.3
"""Human text has 0.005, and greedy text of a language model 0.44 (Welleck et al. 2019,
https://arxiv.org/abs/1908.04319)."""
CRITIC_FOR, CRITIC_ERRORS, CRITIC_AT_MOST = 20, 2.0, -0.1  # a constant, and a new critic, has 0
RISE, RISE_FOR = 3.0, 10  # factor between medians of so many iterations and of as many before
FLAT_AFTER, GAIN = 40, 0.1  # iterations, and standard deviations of the score
FALL, FALL_ERRORS = 0.1, 2.0
"""A gold score that stays the same falls twice in a row in one of six cases, but by 2 standard
errors in one of 50. The course's three runs without a KL penalty fall by 2.6, 3.3 and 12."""
PERPLEXITY = 10.0  # 2.3 nats a token


def prompts_cut(history: History) -> str | None:
    return f"{history.prompts_cut:.0%}" if history.prompts_cut > CUT else None


def groups_alike(history: History) -> str | None:
    is_alike = history.streak("rollout/groups_alike", ">=", ALIKE)
    return is_alike if history.config.advantage in GROUPED else None


def reward_constant(history: History) -> str | None:
    # Compared are values, as the standard deviation of equal ones may be rounded above 0.
    ends = [history.last(f"rollout/reward_{end}", STREAK) for end in ("min", "max")]
    ranges = [row.get("rollout/reward_paid_range") for row in history.rows[-STREAK:]]
    is_same = (ends[0] and ends[0] == ends[1]) or ranges == [0.0] * STREAK
    is_constant = is_same and history.config.rollout_batch_size > 1
    return f"{history.rows[-1]['rollout/reward_max']:g}" if is_constant else None


def length_extreme(history: History) -> str | None:
    full = FULL * history.config.max_response_tokens
    return history.streak(TOKENS, ">=", full) or history.streak(TOKENS, "<=", EMPTY)


def kl_negative(history: History) -> str | None:
    found, deviations = (history.last(name, STREAK) for name in (KL, "rollout/kl_std"))
    if not found or not deviations:
        return None
    mean, responses = fmean(found), STREAK * history.config.rollout_batch_size
    error = math.sqrt(fmean(x * x for x in deviations) / responses)
    is_far = mean < -max(LEAST_KL, SIGMAS * error)
    return f"{mean:.4g}, standard error {error:.2g}" if is_far else None


def kl_exploding(history: History) -> str | None:
    limit, kl = history.config.kl_warning, history.last(KL, 1)
    is_above = limit is not None and kl and kl[0] > limit
    return f"{kl[0]:.4g} nats a response, ppo.kl_warning={limit:g}" if is_above else None


def clip_fraction_high(history: History) -> str | None:
    found = history.last(CLIP, CLIPPED_FOR)
    return f"{fmean(found):.3g}" if found and fmean(found) > CLIPPED else None


def clip_fraction_zero(history: History) -> str | None:
    config = history.config
    names = (CLIP, "update/steps", "update/lr", TOKENS)
    clipped, steps, rates, lengths = (history.last(name, UNMOVED_FOR) for name in names)
    if not (clipped and steps and rates) or any(clipped) or min(steps) <= 1.0:
        return None
    tokens = sum(lengths) * config.rollout_batch_size * config.ppo_epochs
    is_warm = history.rows[-UNMOVED_FOR]["step"] > config.critic_warmup
    if min(rates) < config.lr / 2 or not is_warm or tokens < UNMOVED_TOKENS:
        return None
    return f"ppo.clip_range={config.clip_range:g}, update/lr={rates[-1]:.3g}"


def responses_identical(history: History) -> str | None:
    is_enough = history.config.prompts_per_iteration >= 4
    return history.streak("rollout/most_common", ">=", COMMON) if is_enough else None


def critic_worse(history: History) -> str | None:
    found = history.last("rollout/explained_variance", CRITIC_FOR)
    if not found or not all(map(math.isfinite, found)):
        return None
    mean, error = fmean(found), stdev(found) / math.sqrt(len(found))
    is_worse = mean < min(CRITIC_AT_MOST, -CRITIC_ERRORS * error)
    return f"{mean:.3g}, standard error {error:.2g}" if is_worse else None


def value_loss_rising(history: History) -> str | None:
    found = history.last("update/value_loss", 2 * RISE_FOR)
    if not found or not history.config.has_critic:
        return None
    before, now = median(found[:RISE_FOR]), median(found[RISE_FOR:])
    is_up = now > RISE * before and min(found[RISE_FOR:]) > before
    return f"from {before:.3g} to {now:.3g}" if is_up else None


def reward_flat(history: History) -> str | None:
    rows = [row for row in history.rows if row["step"] > history.config.critic_warmup]
    if len(rows) < FLAT_AFTER or rows[0]["step"] > history.config.critic_warmup + 1:
        return None  # too few for a judgement, or the first ones are no longer kept
    third = len(rows) // 3
    first, last = ([row[REWARD] for row in part] for part in (rows[:third], rows[-third:]))
    gain = fmean(last) - fmean(first)
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / third)
    spread = fmean(row["rollout/reward_std"] for row in rows)
    is_flat = spread != 0.0 and gain + 2 * error < GAIN * spread
    numbers = f"gain {gain:.3g}, standard error {error:.2g}; standard deviation {spread:.3g}"
    return numbers if is_flat else None


def reward_against_gold(history: History) -> str | None:
    rows = [row for row in history.evaluations if GOLD in row]
    if len(rows) < 3:
        return None
    reward, gold = ([row[name] for row in rows] for name in (HELD_OUT, GOLD))
    opposite = reward[-3] < reward[-2] < reward[-1] and gold[-3] > gold[-2] > gold[-1]
    if not opposite or gold[-3] - gold[-1] <= FALL * (max(gold) - min(gold)):
        return None
    before, now = (files.judged(history.run_dir, int(row["step"]), "gold") for row in rows[-3::2])
    falls = [before[index] - now[index] for index in before if index in now]
    if len(falls) < 2 or fmean(falls) <= FALL_ERRORS * stdev(falls) / math.sqrt(len(falls)):
        return None
    return f"reward {reward[-3]:.3g} to {reward[-1]:.3g}, gold {gold[-3]:.3g} to {gold[-1]:.3g}"


def reward_against_perplexity(history: History) -> str | None:
    name = "eval/response_perplexity"
    rows = [row for row in history.evaluations if name in row]
    if not rows or not rows[-1][HELD_OUT] > rows[0][HELD_OUT]:
        return None
    first, now = rows[0][name], rows[-1][name]
    return f"from {first:.3g} to {now:.3g}" if now > PERPLEXITY * first else None


RULES = rules_of(
    f"""
prompts_cut | more than {CUT:.0%} of the training prompts are longer than data.max_prompt_tokens
    | the policy answers prompts that lack their start, or never sees the longest ones
    | Raise data.max_prompt_tokens; data.long_prompts is what becomes of longer ones
groups_alike | rollout/groups_alike >= {ALIKE} {IN_A_ROW}, for the estimators that compare
    ({", ".join(GROUPED)})
    | the prompts are all too hard or too easy, or the score has too few levels
    | Try mixed prompts, a finer reward, a larger ppo.samples_per_prompt or ppo.temperature
reward_constant | all responses have the same score, or paid score, {IN_A_ROW}
    | there is nothing to learn from it
    | Look at the reward, and at samples/; reward.clip must not cut all scores to one
nothing_ends | rollout/ended < {LEAST_ENDED} {IN_A_ROW}
    | ppo.max_response_tokens is too small, or the SFT model never learned the end token
    | Raise ppo.max_response_tokens, or give ppo.stop_strings; data.long_responses=cut in SFT
    teaches no end; ppo.missing_eos=none where responses need no end
length_extreme | rollout/response_tokens is at least {FULL} ppo.max_response_tokens, or at most
    {EMPTY}, {IN_A_ROW}
    | the reward favours long responses, or empty ones
    | Look at samples/, and at the length bias in the reward's fitness report; try
    ppo.length_penalty, ppo.missing_eos_penalty, a larger ppo.kl_coef
kl_negative | kl_divergence over {STREAK} iterations is below -{LEAST_KL:g} nats, and below 0 by
    more than {SIGMAS:g} standard errors
    | responses are not sampled from the distribution of their log-probabilities
    | Look at a sampler of your own: temperature and is_exact; compare ppo.rollout=hf
kl_exploding | kl_divergence > ppo.kl_warning | so far from the SFT model a reward says little
    | Look at samples/; a smaller ppo.lr, or a larger ppo.kl_coef, keeps the policy near
entropy_collapse | entropy < {LEAST_ENTROPY} {IN_A_ROW}
    | nothing new is tried: the steps are too large, or the temperature too low
    | Try a smaller ppo.lr, a larger ppo.kl_coef or ppo.ent_coef, a larger ppo.temperature
ratio_outliers | update/ratio_max > {LARGEST_RATIO} {IN_A_ROW}
    | steps are too large, or sampling and training compute different log-probabilities
    | Try a smaller ppo.lr or ppo.ppo_epochs, ppo.target_kl=0.02, ppo.dual_clip=3
clip_fraction_high | update/clip_fraction > {CLIPPED:g} on average over {CLIPPED_FOR} iterations
    | the policy moves further in an iteration than the clipped loss can follow
    | Try a smaller ppo.lr or ppo.ppo_epochs, a larger ppo.minibatch_size, ppo.target_kl=0.02
clip_fraction_zero | update/clip_fraction is 0 in {UNMOVED_FOR} iterations in a row, in which the
    policy learns from {UNMOVED_TOKENS} tokens or more, in several steps and at half of ppo.lr or
    more | the steps are too small, or the clip range is so wide that nothing is clipped
    | Try a larger ppo.lr (model=small has one for few weights), a ppo.clip_range near 0.2, more
    ppo.ppo_epochs
responses_identical | rollout/most_common >= {COMMON} {IN_A_ROW}, of 4 prompts or more
    | the reward does not depend on the prompt, or the policy has collapsed
    | Look at samples/ and at the reward; try a larger ppo.kl_coef, a smaller ppo.lr
responses_repeat | rollout/repetition > {REPEATED} {IN_A_ROW}
    | responses repeat the same words: the reward favours it, or the model loops
    | Look at samples/; try a smaller ppo.max_response_tokens, a larger ppo.kl_coef or
    ppo.temperature, a reward that sees repetition
critic_worse | rollout/explained_variance over {CRITIC_FOR} iterations is below {CRITIC_AT_MOST:g}
    on average, and below 0 by more than {CRITIC_ERRORS:g} standard errors
    | the critic adds noise: its learning rate is too high, or its targets move too fast
    | Try a smaller ppo.value_lr_factor, ppo.critic_warmup, advantage=rloo without a critic
value_loss_rising | the median of update/value_loss over {RISE_FOR} iterations is above {RISE:g}
    times that of the {RISE_FOR} before, and each of them is above it
    | the critic diverges, or returns grow faster than ppo.clip_range_vf lets it follow
    | Try a smaller ppo.value_lr_factor or ppo.vf_coef, ppo.score_normalization=running,
    ppo.clip_range_vf=null
reward_flat | after {FLAT_AFTER} to {KEPT} iterations, reward_mean of the last third is, with 2
    standard errors, less than {GAIN:g} standard deviations of the score above that of the first
    third | the steps are too small, ppo.kl_coef is too large, or the reward is noise
    | Try a larger ppo.lr, a smaller ppo.kl_coef, a larger ppo.rollout_batch_size against noise;
    stage=eval_reward tells whether the reward is fit to be maximised
reward_against_gold | {HELD_OUT} rises and {GOLD} falls in two evaluations in a row, by more than
    {FALL:.0%} of its range so far and {FALL_ERRORS:g} standard errors of the difference prompt by
    prompt
    | the policy exploits the reward: what it favours is no longer what is wanted
    | Take the checkpoint with the best gold score; try a larger ppo.kl_coef, fewer ppo.iterations,
    a better reward; compare samples/eval_*.jsonl
reward_against_perplexity | eval/response_perplexity is more than {PERPLEXITY:g} times that of the
    first evaluation, while {HELD_OUT} is higher
    | the policy has left the language of the data for what the reward favours
    | Look at samples/eval_*.jsonl; try a larger ppo.kl_coef, fewer ppo.iterations
""",
    vars(),
)
"""Name | condition | cause | remedy of each rule, in their order. The function of that name finds
its numbers; a rule without a function is a streak."""


@dataclass(eq=False)
class Diagnosis(Callback):
    """Callback that reports each symptom of a fault once per run, with its cause and a remedy.

    A finding is one line on the console, an entry of `<run_dir>/diagnosis.json` and an alert of
    W&B. Place this callback after those that measure, and before Checkpoints, so that a resumed run
    repeats no finding.
    """

    history: History
    stage: str = "ppo"
    """Name of the section of the configuration whose keys the findings name."""
    rules: Sequence[Rule] = RULES
    """Rules in their order of precedence."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Entries of the file: rule, iteration, symptom, cause, remedy; samples for SHOWN."""

    def state_dict(self) -> dict[str, Any]:
        kept = {"rows": self.history.rows, "evaluations": self.history.evaluations}
        return {**kept, "findings": [*self.findings]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.findings = state_dict["findings"]
        self.history.rows, self.history.evaluations = state_dict["rows"], state_dict["evaluations"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.write()  # without the findings behind the checkpoint that a run goes on from

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        unread = ("eval/", "time/", "compute/")
        row = {n: x for n, x in progress.latest(trainer).items() if not n.startswith(unread)}
        self.history.rows = [*self.history.rows, row | {"step": pl_module.iteration}][-KEPT:]
        self.diagnose(trainer, pl_module.iteration)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not progress.is_evaluation(trainer):
            return
        found = {n: x for n, x in progress.latest(trainer).items() if n.startswith("eval/")}
        step = pl_module.iteration
        before = [row for row in self.history.evaluations if row["step"] != step]
        self.history.evaluations = [*before, found | {"step": step}][-KEPT:]
        self.diagnose(trainer, step)

    def diagnose(self, trainer: Trainer, iteration: int) -> None:
        """Apply the rules that were not reported yet, and report those that find a symptom.

        Raises ConfigError where a rule fails.
        """
        history = self.history
        reported = {finding["rule"] for finding in self.findings}
        for each in (one for one in self.rules if one.name not in reported):
            try:
                numbers = each.find(history)
            except FAULTS as error:  # code of the user's own
                fault = f"raised {error!r} after iteration {iteration}; allowed: a text, or None"
                raise ConfigError(f"the rule {each.name!r} of the diagnosis {fault}") from error
            if numbers is None:
                continue
            symptom = f"{each.when} ({numbers})"
            found = {"symptom": symptom, "cause": each.cause, "remedy": each.remedy}
            found = {n: own_keys(x, self.stage, vars(history.config)) for n, x in found.items()}
            samples = self.samples(trainer) if each.name in SHOWN else []
            shown = {"samples": samples} if samples else {}
            self.findings.append({"rule": each.name, "iteration": iteration, **found, **shown})
            self.write()
            text = "{symptom}: {cause}. {remedy}".format(**found)
            print_line(f"warning: {text}", "yellow")
            for sample in samples:
                print_line(f"  {visible_line(str(sample))}", "yellow")
            for logger in trainer.loggers:
                if isinstance(logger, RunWandb):
                    logger.alert(each.name, text)

    def samples(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Return the first responses of the iteration, with the explanations of the reward."""
        module: Any = trainer.lightning_module
        some = evaluation.training_samples(module, module.experience.select(slice(0, COUNT)))
        keys = "prompt", "response", "score", "verdicts"
        return [{key: sample[key] for key in keys if key in sample} for sample in some]

    def write(self) -> None:
        """Write all findings to the file."""
        with written_whole(self.history.run_dir / DIAGNOSIS) as temporary:
            temporary.write_text(json.dumps(self.findings, indent=2) + "\n", encoding="utf-8")


class OwnRule(Callback):
    """Callback that adds a rule of the user's own to those of the diagnosis, behind them."""

    def __init__(self, rule: str) -> None:
        """Load the rule `path/to/file.py:name` or `package.module:name`.

        Raises ConfigError where `rule` does not lead to a Rule.
        """
        self.rule: Rule = load_object(rule, "rule", "rule", lambda found: isinstance(found, Rule))

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Diagnosis) and self.rule not in callback.rules:
                callback.rules = (*callback.rules, self.rule)
