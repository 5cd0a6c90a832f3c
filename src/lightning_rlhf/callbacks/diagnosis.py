"""The diagnosis of a run of PPO while it goes on: each rule of RULES is applied to its metrics."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rlhf.callbacks.loggers import RunWandb
from lightning_rlhf.callbacks.progress import is_evaluation, latest
from lightning_rlhf.callbacks.rules import RULES, History, Row, Rule
from lightning_rlhf.core.config import PPOConfig
from lightning_rlhf.core.errors import ConfigError, own_keys
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import written_whole
from lightning_rlhf.io.user_code import FAULTS, load_object

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
        self, config: PPOConfig, run_dir: Path, *, prompts_cut: float = 0.0, stage: str = "ppo",
        rules: Sequence[Rule] = RULES,
    ) -> None:  # fmt: skip
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
        self.findings: list[dict[str, Any]] = []
        """Entries of the file: rule, iteration, symptom, cause, remedy."""

    def state_dict(self) -> dict[str, Any]:
        return {name: list(vars(self)[name]) for name in ("rows", "evaluations", "findings")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update({name: list(kept) for name, kept in state_dict.items()})

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.write()  # without the findings behind the checkpoint that a run goes on from

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        found = {n: x for n, x in latest(trainer).items() if not n.startswith(UNREAD)}
        self.rows = [*self.rows, found | {"step": pl_module.iteration}][-KEPT:]
        self.diagnose(trainer, pl_module.iteration)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not is_evaluation(trainer):
            return
        found = {n: x for n, x in latest(trainer).items() if n.startswith("eval/")}
        step = pl_module.iteration
        before = [row for row in self.evaluations if row["step"] != step]
        self.evaluations = [*before, found | {"step": step}][-KEPT:]
        self.diagnose(trainer, step)

    def diagnose(self, trainer: Trainer, iteration: int) -> None:
        """Apply the rules that were not reported yet, and report those that find a symptom.

        Raises ConfigError where a rule fails.
        """
        history = History(
            rows=self.rows, evaluations=self.evaluations, config=self.config,
            prompts_cut=self.prompts_cut, run_dir=self.path.parent,
        )  # fmt: skip
        reported = {finding["rule"] for finding in self.findings}
        for each in (one for one in self.rules if one.name not in reported):
            try:
                numbers = each.find(history)
            except FAULTS as error:  # code of the user's own
                raise ConfigError(
                    f"the rule {each.name!r} of the diagnosis raised {error!r} on {len(self.rows)} "
                    f"iterations and {len(self.evaluations)} evaluations; allowed: to return a "
                    "text, or None"
                ) from error
            if numbers is None:
                continue
            symptom = f"{each.when} ({numbers})"
            found = {"symptom": symptom, "cause": each.cause, "remedy": each.remedy}
            found = {n: own_keys(x, self.stage, vars(self.config)) for n, x in found.items()}
            self.findings.append({"rule": each.name, "iteration": iteration, **found})
            self.write()
            text = "{symptom}: {cause}. {remedy}".format(**found)
            print_line(f"warning: {text}", "yellow")
            for logger in trainer.loggers:
                if isinstance(logger, RunWandb):
                    logger.alert(each.name, text)

    def write(self) -> None:
        """Write all findings to the file."""
        with written_whole(self.path) as beside:
            beside.write_text(json.dumps(self.findings, indent=2) + "\n", encoding="utf-8")


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
