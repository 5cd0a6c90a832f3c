"""What is reported of a run while it goes on: each symptom once, with its cause and a remedy."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks.diagnosis import DIAGNOSIS, RULES, Diagnosis, History, OwnRule
from lightning_rlhf.callbacks.files import eval_samples, write_samples
from lightning_rlhf.callbacks.metrics import PPOMetrics, publish
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.results import RESULT
from lightning_rlhf.core.shaping import RunningMoments, ScoreMoments

from .conftest import FakePPO, Fit, make_experience
from .test_metric_callbacks import SaveAt

EVALUATES: dict[str, Any] = {"num_sanity_val_steps": -1, "val_check_interval": 1}
DOCS = Path(__file__).parents[2] / "docs" / "diagnosis.md"
NAMED = {rule.name: rule for rule in RULES}
CONSTANT = "warning: all responses have the same score"


class Scored(FakePPO):
    """Iteration k scores its two responses scores[k], and is kl[k] nats from the reference."""

    def __init__(self, scores: list[tuple[float, float]], kl: list[float] | None = None) -> None:
        super().__init__()
        self.scores, self.kl = scores, kl or [0.0] * len(scores)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        score = torch.tensor(self.scores[self.iteration])
        # Both responses have the same sum, of which kl_divergence is the mean.
        kl = torch.zeros(2, 3)
        kl[:, 0] = self.kl[self.iteration]
        experience = make_experience(score=score, component_scores=score[:, None], kl=kl)
        result = super().training_step(batch, batch_idx)[RESULT]
        self.experience = experience
        return {RESULT: replace(result, experience=experience)}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(fit: Fit, module: FakePPO, kl_warning: float | None = None, **options: Any) -> Diagnosis:
    given = {"kl_warning": kl_warning, "rollout_batch_size": 2, "max_response_tokens": 48}
    more = {"advantage": "gae", "has_critic": True, "prompts_per_iteration": 2}
    more |= {"critic_warmup": 0, "lr": 0.5}
    config: Any = SimpleNamespace(**given, **more)
    rules = [NAMED["reward_constant"], NAMED["kl_exploding"]]
    diagnosis = Diagnosis(History(config, Path()), rules=rules)
    callbacks = [PPOMetrics(), diagnosis, *options.pop("more", [])]
    fit(module, callbacks, [], batches=len(module.scores), limit_val_batches=0, **options)
    return diagnosis


def findings() -> list[dict[str, Any]]:
    """What the file in the run's folder holds."""
    found: list[dict[str, Any]] = json.loads(Path(DIAGNOSIS).read_text())
    return found


SAME, OTHER = (0.1, 0.1), (0.1, 0.2)


def test_what_is_paid_counts_where_it_is_not_what_is_reported(fit: Fit, capsys: Any) -> None:
    """Scores of 3 and 4 clipped at 1 are both rewards of 1."""

    class Clipped(Scored):
        moments = ScoreMoments(RunningMoments(1, 0.0, 0.0), (RunningMoments(1, 0.0, 0.0),))

    module = Clipped([(3.0, 4.0)] * 3)
    reward = module.collector.reward
    module.collector.reward = replace(reward, terms=(replace(reward.terms[0], clip=1.0),))
    train(fit, module)
    assert capsys.readouterr().out.count(CONSTANT) == 1


def test_each_finding_is_told_once_and_the_file_holds_its_numbers(fit: Fit, capsys: Any) -> None:
    """Rewards are constant twice, the first time with another one in each iteration."""
    train(fit, Scored([OTHER] * 2))
    assert findings() == []
    scores = [OTHER, (1.0, 1.0), (2.0, 2.0), (3.0, 3.0), OTHER, *[SAME] * 3]
    train(fit, Scored(scores, [1.0, 9.5, *[99.0] * 6]), 9.0)
    assert capsys.readouterr().out.count(CONSTANT) == 1
    first, second = findings()
    assert [(f["rule"], f["iteration"]) for f in (first, second)] == [
        ("kl_exploding", 2),
        ("reward_constant", 4),
    ]
    assert "(9.5 nats a response, ppo.kl_warning=9)" in first["symptom"]
    assert first["remedy"] == NAMED["kl_exploding"].remedy


def test_a_constant_reward_is_shown_with_the_checker_s_explanations(fit: Fit, capsys: Any) -> None:
    module = Scored([SAME] * 3)
    reward = module.collector.reward
    checker = SimpleNamespace(explain=lambda decoded: ["no number", None])
    module.collector.reward = replace(reward, sources=(checker,))
    train(fit, module)
    [finding] = findings()
    first, second = finding["samples"]
    assert (first["verdicts"], "verdicts" in second) == ({"head": "no number"}, False)
    assert [one["score"] for one in (first, second)] == pytest.approx(SAME)
    assert first["prompt"] == "train question 1 [b]?"
    assert capsys.readouterr().out.count("no number") == 1


def test_a_resumed_run_ends_with_the_same_findings(fit: Fit, tmp_path: Path) -> None:
    """Those behind the checkpoint are removed, and found once more."""
    path, module = tmp_path / "cut.ckpt", Scored([SAME] * 5, [1.0, 99.0, 99.0, 99.0, 99.0])
    whole = train(fit, module, 50.0, more=[SaveAt(2, path)])
    expected = findings()
    assert [f["iteration"] for f in expected] == [2, 3]
    resumed = train(fit, Scored(module.scores, module.kl), 50.0, ckpt_path=path)
    assert findings() == expected
    assert resumed.state_dict() == whole.state_dict()


def test_every_evaluation_counts_once(fit: Fit) -> None:
    """Gold falls in the evaluations of iterations 1 and 2, while the reward rises."""

    class Falls(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            step = pl_module.iteration
            publish(trainer, pl_module, {"eval/reward_mean": step, "eval/judge/gold": 1.0 - step})
            rows = [{"index": index, "judge": {"gold": 1.0 - step}} for index in range(2)]
            write_samples(eval_samples(Path(), step), rows)

    config: Any = SimpleNamespace(kl_warning=None)
    diagnosis = Diagnosis(History(config, Path()), rules=[NAMED["reward_against_gold"]])
    fit(FakePPO(), [Falls(), diagnosis], [], batches=3, **EVALUATES)
    assert [row["step"] for row in diagnosis.history.evaluations] == [0, 1, 2, 3]
    [finding] = findings()
    assert (finding["rule"], finding["iteration"]) == ("reward_against_gold", 2)
    assert "gold 1 to -1" in finding["symptom"]


def test_the_rule_in_the_docs_is_applied_from_the_first_evaluation_on(fit: Fit) -> None:
    """Responses of 2, 5, 6 and 7 tokens: above 3 times the first in the last two iterations."""

    class Lengthens(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            tokens = {1: 2.0, 2: 5.0, 3: 6.0, 4: 7.0}[pl_module.iteration]
            publish(trainer, pl_module, {"rollout/response_tokens": tokens})

    [text] = re.findall(
        r"<!-- file: drift.py -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL
    )
    Path("drift.py").write_text(text)
    diagnosis = Diagnosis(History(SimpleNamespace(), Path()), rules=[])  # type: ignore[arg-type]
    own = OwnRule("drift.py:drift")
    fit(FakePPO(), [Lengthens(), diagnosis, own], [], batches=4, **EVALUATES)
    assert [(f["rule"], f["iteration"], f["symptom"]) for f in findings()] == [
        ("drift", 4, "responses are three times as long as in the first iteration (7, 2 before)")
    ]
    with pytest.raises(ConfigError, match=r"has no rule 'other', it has \['drift'\]"):
        OwnRule("drift.py:other")


def test_a_rule_that_fails_is_one_line(fit: Fit) -> None:
    Path("faulty.py").write_text(
        "from lightning_rlhf.callbacks.diagnosis import rule\n"
        "@rule(when='always', cause='none', remedy='none')\n"
        "def faulty(history):\n    exit(0)\n"
    )
    diagnosis = Diagnosis(History(SimpleNamespace(), Path()), rules=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^the rule 'faulty' .* raised SystemExit\(0\) after"):
        fit(FakePPO(), [diagnosis, OwnRule("faulty.py:faulty")], [], batches=1, **EVALUATES)
