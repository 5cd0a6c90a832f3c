"""A reward that its own fitness report advises against: refused, or reported everywhere."""

import json
import shutil
from pathlib import Path

import pytest

from lightning_rlhf.evaluation.build_rewards import text_scorer
from lightning_rlhf.evaluation.run_report import stage_report
from lightning_rlhf.models.checkpoint import MANIFEST, find
from lightning_rlhf.runs.measured import read_run

from .conftest import Workplace, given, make_workplace
from .others import until_called

NOT_FIT = "Not fit: on held-out pairs it is not surely better than guessing."
UNFIT = {
    "is_unfit": True,
    "words": f"{NOT_FIT} 1 of 6 checks flagged (better than guessing), 0 not tested.",
    "reasons": ["better than guessing: ranks 50.0% of held-out pairs right"],
}


def ppo(run: str, *overrides: str) -> list[str]:
    return ["stage=ppo", f"run={run}", "ppo.iterations=1", *overrides]


@pytest.fixture(scope="module")
def backwards(pipeline: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A reward model that learned to like "yes yes yes", and 40 held-out pairs that do not."""
    place = make_workplace(tmp_path_factory.mktemp("unfit") / "work")
    good, bad = "Yes yes yes.", "No."
    for part, count, chosen, rejected in (("train", 32, good, bad), ("val", 40, bad, good)):
        sides = {"chosen": chosen, "rejected": rejected}
        pairs = [json.dumps({"prompt": f"{part} {i}?", **sides}) + "\n" for i in range(count)]
        (place.folder / "data" / f"preferences_{part}.jsonl").write_text("".join(pairs))
    shutil.copytree(pipeline.stage("sft"), place.stage("sft"))
    place.mini("stage=rm", "rm.lr=1e-2", "rm.val_every=6", "data.max_val_rows=null").succeeded  # noqa: B018
    return place


def test_an_unfit_reward_is_refused_before_a_model_loads(
    backwards: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 of the 40 pairs are ranked right, so that the interval lies at 0."""
    monkeypatch.setattr("lightning_rlhf.models.build_roles.start_from", pytest.fail)
    final = backwards.stage("rm") / "final"
    written = find(str(final), "").require_manifest("rm").verdicts["rm"]
    assert written.is_unfit
    assert written.words.startswith(NOT_FIT)
    error = backwards.mini(*ppo("refused", *given(backwards))).error
    assert error.startswith(f"reward head is unfit by its fitness report {final / 'report.md'}: ")
    assert NOT_FIT in error
    (reason,) = (why for why in written.reasons if why.startswith("better than guessing: "))
    assert "ranks 0.0% of held-out pairs right, interval 0.0% to" in reason
    assert error.endswith("reward.unfit=warn runs PPO on it all the same")
    assert not (backwards.outputs / "refused").exists()


def test_warn_runs_and_tells_it_at_the_start_in_the_table_and_in_the_manifest(
    backwards: Workplace,
) -> None:
    command = ppo("warned", *given(backwards), "reward.unfit=warn")
    out = " ".join(backwards.mini(*command).succeeded.out.split())
    start, table, end = out.partition("On held-out prompts")
    assert f"reward head: {NOT_FIT}" in start
    assert "PPO is run on it all the same." in start
    assert "Reward head: Not fit: on held-out pairs" in table + end
    manifest = find(str(backwards.stage("ppo", "warned") / "final"), "").require_manifest("ppo")
    assert manifest.verdicts["head"].is_unfit
    assert manifest.verdicts["head"].words.startswith(NOT_FIT)
    assert stage_report(read_run(backwards.stage("ppo", "warned"))).verdict.level == "bad"


def test_a_report_of_eval_reward_counts_where_the_reward_has_no_other(backwards: Workplace) -> None:
    """A function has none of its own; another reward is not judged by the report on this one."""
    code = "def score(prompts, responses, **_):\n    return [-len(r) for r in responses]"
    path = backwards.folder / "short.py"
    path.write_text(code)
    words = ["reward=function", f"reward.path={path}:score", given(backwards)[0], "run=function"]
    backwards.mini("stage=eval_reward", "eval_reward.samples=8", *words).succeeded  # noqa: B018
    sft = f"eval_policy.policies=[{backwards.stage('sft') / 'final'}]"
    for comment, is_used in (("", True), ("  # another", False)):
        path.write_text(code + comment)
        more = [sft, "data.judge=null", "eval_policy.samples_per_prompt=1"]
        backwards.mini("stage=eval_policy", *words, *more, "overwrite=true").succeeded  # noqa: B018
        file = backwards.stage("eval_policy", "function") / "final" / "evaluation.json"
        assert ("function" in json.loads(file.read_text())["verdicts"]) == is_used


@pytest.fixture
def unfit(finished: Workplace) -> Path:
    """rm/final with a verdict against it."""
    file = finished.stage("rm") / "final" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"verdicts": {"rm": UNFIT}}))
    return file.parent


def test_a_server_says_the_verdict(unfit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_scorer(str(unfit), [])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{unfit}: {UNFIT['words']} It is served all the same." in said


def test_each_weighted_component_may_refuse_and_one_of_weight_0_only_warns(
    finished: Workplace, unfit: Path
) -> None:
    parts = [
        "reward=sum", "+reward@reward.components.liked=head",
        "+reward@reward.components.dice=random", given(finished)[0],
        f"reward.components.liked.checkpoint={unfit}",
    ]  # fmt: skip
    error = finished.mini(*ppo("sum", *parts)).error
    assert error.startswith("reward liked is unfit by its fitness report ")
    assert "reward.components.liked.unfit=warn runs PPO on it all the same" in error
    free = until_called(finished, *ppo("free", *parts, "reward.components.liked.weight=0"))
    assert f"reward liked: {NOT_FIT}" in free


def test_one_on_the_hub_is_asked_once_it_is_fetched(
    finished: Workplace, unfit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rlhf.models.checkpoint.local_folder", lambda *_: unfit)
    hub = ["reward=model", "reward.name_or_path=org/judge", given(finished)[0]]
    error = finished.mini(*ppo("hub", *hub)).error
    assert error.startswith("reward model is unfit by its fitness report ")
