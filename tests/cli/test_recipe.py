"""A recipe: stages as processes, what is done is not done again, promises are checked."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from filelock import FileLock
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_rlhf.callbacks.evaluation import load_judge
from lightning_rlhf.cli import main
from lightning_rlhf.cli.arguments import parse_overrides
from lightning_rlhf.cli.recipe import Promise, Recipe, data_of_run, read_recipe, step_overrides
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.io.user_code import load_object
from lightning_rlhf.report.run_page import Evaluated
from lightning_rlhf.runs import console
from lightning_rlhf.runs.folders import LOCK
from lightning_rlhf.runs.settings import read_settings

from .conftest import MINI, PRESETS, STAGES, Outcome, Workplace, make_workplace, tree, weights

RECIPES = console.RECIPES
SHORT = ("sft.epochs=0.25", "rm.epochs=0.25", "ppo.iterations=1", "preflight=off")
RECIPE: dict[str, Any] = {
    "title": "Small",
    "stages": ["sft", "rm", "ppo"],
    "program": None,
    "overrides": ["model=mini", "data=small", "seed=3", *SHORT],
    "promises": [
        {"stage": "rm", "metric": "eval/accuracy", "at_least": 0.0},
        {"stage": "ppo", "metric": "eval/kl", "at_most": 50.0},
        {"stage": "ppo", "metric": "eval/reward_mean", "gain": -99.0},
    ],
    "next": ["Read a book."],
}


class Kitchen:
    """A recipes folder of one's own, and the processes that a recipe started."""

    def __init__(self, place: Workplace, recipes: Path) -> None:
        self.place, self.recipes = place, recipes
        self.commands: list[list[str]] = []
        self.status: dict[str, int] = {}
        """Stage -> exit status with which its process ends without doing anything."""

    def write(self, **changes: Any) -> None:
        folder = self.recipes / "small"
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | changes))

    def cook(self, *overrides: str) -> Outcome:
        self.commands.clear()
        return self.place.call("--config-dir", str(PRESETS), "recipe=small", *overrides)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """In place of run_command: the stage in this process, which starts within a second."""
        self.commands.append(list(command))
        assert list(command[:3]) == [sys.executable, "-m", "lightning_rlhf"]
        stage = next(o for o in command if o.startswith("stage=")).removeprefix("stage=")
        if stage in self.status:
            return self.status[stage]
        outcome = self.place.call(*command[3:])
        print(outcome.out, end="")
        print(outcome.err, end="", file=sys.stderr)
        return outcome.status

    @property
    def ran(self) -> list[str]:
        """The stages that were started."""
        return [next(o for o in c if o.startswith("stage=")).split("=")[1] for c in self.commands]

    def folder(self, stage: str) -> Path:
        return self.place.stage(stage)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipes folder with the quickstart in it. One for all, since runs keep its path."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "quickstart").symlink_to(RECIPES / "quickstart")
    return folder


def make_kitchen(folder: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch) -> Kitchen:
    """With recipe=small, whose stages run in this process."""
    monkeypatch.setattr(console, "RECIPES", recipes)
    kitchen = Kitchen(make_workplace(folder / "work"), recipes)
    monkeypatch.setattr("lightning_rlhf.cli.recipe.run_command", kitchen.run)
    kitchen.write()
    return kitchen


@pytest.fixture
def kitchen(tmp_path: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch) -> Kitchen:
    """Before a first call."""
    return make_kitchen(tmp_path, recipes, monkeypatch)


@pytest.fixture(scope="module")
def first_call(
    tmp_path_factory: pytest.TempPathFactory, recipes: Path
) -> tuple[Kitchen, list[str], str]:
    """What a first call left, the stages it started, and its output."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        kitchen = make_kitchen(tmp_path_factory.mktemp("first"), recipes, monkeypatch)
        out = kitchen.cook().succeeded.out
        return kitchen, kitchen.ran, out


@pytest.fixture
def done(kitchen: Kitchen, first_call: tuple[Kitchen, list[str], str]) -> Kitchen:
    """After a first call."""
    shutil.copytree(first_call[0].place.outputs, kitchen.place.outputs, symlinks=True)
    return kitchen


def test_the_first_call_runs_the_stages_and_sums_up(
    first_call: tuple[Kitchen, list[str], str],
) -> None:
    kitchen, ran, out = first_call
    assert ran == ["sft", "rm", "ppo"]
    for stage in STAGES:
        assert (kitchen.folder(stage) / "final" / "manifest.json").is_file()
    assert out.count("On held-out prompts") == 1
    assert out.count("held-out prompts:\n  prompt        ") == len(STAGES)
    assert "Small: what it promises" in out
    assert out.count(" kept\n") == 3
    assert "Read a book." in out


def test_the_second_call_runs_nothing_and_says_so(done: Kitchen) -> None:
    before = [weights(done.folder(stage)) for stage in STAGES]
    out = done.cook().succeeded.out
    assert done.ran == []
    assert out.count("done already") == 3
    assert "overwrite=true" in out
    assert [weights(done.folder(stage)) for stage in STAGES] == before
    done.status = dict.fromkeys(STAGES, 0)
    done.cook("overwrite=true", "seed=4").succeeded  # noqa: B018
    assert done.ran == ["sft", "rm", "ppo"]
    assert all(command[-1] == "overwrite=true" for command in done.commands)


def test_a_recipe_can_be_swept(kitchen: Kitchen) -> None:
    kitchen.write(stages=["sft"], promises=[])
    outcome = kitchen.place.call("-m", *MINI, "recipe=small", "seed=choice(1)").succeeded
    assert kitchen.ran == ["sft"]
    assert outcome.out.count(" done ") == 1


def test_a_recipe_may_end_with_an_evaluation_and_promise_its_gain(done: Kitchen) -> None:
    done.write(
        stages=[*STAGES, "eval_policy"],
        promises=[{"stage": "eval_policy", "metric": "eval/reward_mean", "gain": -99.0}],
    )
    done.cook("eval_policy.samples_per_prompt=1").succeeded  # noqa: B018
    assert done.ran == ["eval_policy"]
    found = json.loads((done.folder("eval_policy") / "final" / "evaluation.json").read_text())
    sft, policy = (
        found["policies"][name]["sampled"]["eval/reward_mean"] for name in ("sft", "ppo")
    )
    promises = json.loads((done.folder("sft").parent / "promises.json").read_text())
    [row] = promises
    assert row["verdict"] == "kept"
    assert row["measured"].startswith(f"{policy - sft:.3f} [")  # with an interval over prompts


def test_what_stands_on_a_stage_that_was_run_again_is_done_again(done: Kitchen) -> None:
    """With a row less and so with other weights, in the same folder and configuration."""
    before = {stage: weights(done.folder(stage)) for stage in STAGES}
    file = done.place.folder / "data" / "preferences_train.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    done.place.mini("stage=rm", "seed=3", "rm.epochs=0.25", "overwrite=true").succeeded  # noqa: B018
    done.cook().succeeded  # noqa: B018
    assert done.ran == ["ppo"]
    changed = {stage for stage in STAGES if weights(done.folder(stage)) != before[stage]}
    assert changed == {"rm", "ppo"}
    done.cook().succeeded  # noqa: B018
    assert done.ran == []


def test_a_stage_is_outdated_by_newer_data_of_the_run(
    done: Kitchen, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, final = done.place.folder / "made.jsonl", done.folder("rm") / "final"
    made.touch()
    source = lambda settings, folder: made if settings.stage == "rm" else None  # noqa: E731
    monkeypatch.setattr("lightning_rlhf.cli.recipe.data_of_run", source)
    done.status = dict.fromkeys(STAGES, 0)
    for later, ran in ((-1, []), (1, ["rm"])):
        os.utime(made, ns=(0, final.stat().st_mtime_ns + later))
        done.cook().succeeded  # noqa: B018
        assert done.ran == ran


def test_a_recipe_is_run_by_one_process_at_a_time(done: Kitchen) -> None:
    with FileLock(done.folder("ppo").parent / LOCK):
        assert "outputs/default/mini is being written by another process" in done.cook().error
    assert done.ran == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ppo/final/manifest.json", b'{"metrics": [1]}'),
        ("ppo/samples/eval_000000.jsonl", None),
        ("sft/parents.json", b"[1]"),
    ],
)
def test_a_damaged_result_is_named_and_nothing_is_removed_or_changed(
    done: Kitchen, name: str, content: bytes | None
) -> None:
    file = done.folder("sft").parent / name
    if content is None:  # a folder stands in its place
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content)
    before = tree(done.place.folder)
    error = done.cook().error
    assert file.name in error, error
    assert tree(done.place.folder) == before
    assert done.ran == []


def test_a_stage_that_was_cut_off_is_resumed(done: Kitchen) -> None:
    before = weights(done.folder("ppo"))
    shutil.rmtree(done.folder("ppo") / "final")
    out = done.cook().succeeded.out
    assert done.ran == ["ppo"]
    assert "resume=auto" in done.commands[0]
    assert out.count("done already") == 2
    assert weights(done.folder("ppo")) == before


def test_a_stage_that_ends_well_but_leaves_nothing_stops_the_rest(kitchen: Kitchen) -> None:
    """Lightning ends a process that was sent SIGTERM with exit status 0."""
    kitchen.status = {"sft": 0}
    assert "no.jsonl does not exist" in kitchen.cook("data.prompts.train=no.jsonl").error
    assert kitchen.ran == []  # for a fault in the last stage's data costs no training
    error = kitchen.cook("seed=7", "logger=tensorboard").error
    assert kitchen.ran == ["sft"]
    assert "stage=sft failed" in error
    (command,) = kitchen.commands  # the user's values win over the recipe's
    assert {"seed=7", "logger=tensorboard", "model=mini"} <= {*command}
    assert "seed=3" not in command


def test_a_broken_promise_is_reported_with_its_numbers(done: Kitchen) -> None:
    """Words that change no result do not release the recipe from it."""
    name = "eval/reward_mean"
    done.write(promises=[*RECIPE["promises"], {"stage": "ppo", "metric": name, "gain": 99.0}])
    same = ("trainer=cpu", "model=mini", "data=small", "reward.unfit=warn", "ppo.iterations=1")
    outcome = done.cook(*same)
    assert done.ran == []
    metrics = json.loads((done.folder("ppo") / "final/manifest.json").read_text())["metrics"]
    gain = metrics[name] - metrics[f"start/{name}"]
    assert outcome.error.startswith(f"Small did not keep its promises: {name} is {gain:.3f}")
    assert outcome.error.endswith("promised: gain of 99")
    assert outcome.out.count(" broken\n") == 1


@pytest.mark.parametrize(
    ("bound", "value", "interval", "verdict"),
    [
        ("at_least", 0.499, (0.4, 0.5), "within noise"),
        ("at_least", 0.6, (0.499, 0.7), "within noise"),  # the point alone does not keep it
        ("at_least", 0.6, (0.5, 0.7), "kept"),
        ("at_most", 0.5, None, "kept"),
        ("at_least", 0.45, (0.4, 0.499), "broken"),
        ("at_most", 0.6, (0.501, 0.7), "broken"),
        ("gain", 0.4, (0.3, 0.499), "broken"),
    ],
)
def test_a_promise_is_judged_by_the_interval(
    bound: str, value: float, interval: tuple[float, float] | None, verdict: str
) -> None:
    promise = Promise(stage="ppo", metric="x", **{bound: 0.5})
    one = Evaluated(metric="x", value=value, interval=interval, gain=value, gain_interval=interval)
    assert promise.row(one).verdict == verdict


def test_a_broken_promise_is_no_failure_where_the_user_changed_a_number(done: Kitchen) -> None:
    """1 iteration, and these data, are what `done` ran with; here the recipe says others."""
    broken = {"stage": "rm", "metric": "eval/accuracy", "at_least": 1.5}
    done.write(overrides=[*RECIPE["overrides"], "data.max_val_rows=2"], promises=[broken])
    assert "what it promises" not in done.cook("data.max_val_rows=null").succeeded.out
    missing = {"stage": "ppo", "metric": "eval/judge/charm", "at_least": 0.1}
    grown = {"stage": "rm", "metric": "eval/accuracy", "gain": 2.0}
    done.write(overrides=[*RECIPE["overrides"], "ppo.iterations=2"], promises=[missing, grown])
    out = done.cook("ppo.iterations=1").succeeded.out
    assert done.ran == []
    assert (out.count("not measured"), out.count(" broken\n")) == (1, 2)
    assert "Not as the recipe is written: ppo.iterations; so its promises are shown" in out


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings of each stage of a shipped recipe."""
    main.register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(console.CONF), version_base="1.3"):
        words = {stage: step_overrides(recipe, stage, (), None) for stage in recipe.stages}
        return {stage: read_settings(compose("config", [*own])) for stage, own in words.items()}


@pytest.mark.parametrize("name", ["quickstart", "composite_reward", "course", "dpo"])
def test_a_shipped_recipe_promises_what_is_measured(name: str) -> None:
    recipe = read_recipe(RECIPES / name)
    settings = settings_of(recipe)
    assert all(found.model.name == "tiny" for found in settings.values())
    components = [*settings[recipe.stages[-1]].reward]
    judge = load_judge(f"{RECIPES / 'quickstart' / 'judge.py'}:judge")
    prompts = (RECIPES / "quickstart" / "data" / "prompts_val.jsonl").read_text().splitlines()
    parts = {part for row in prompts for part, value in judge(json.loads(row), "", True).items()
             if value is not None}  # fmt: skip
    known = {*METRICS, *(f"eval/judge/{part}" for part in parts)}
    known |= {f"eval/reward/{part}" for part in components if len(components) > 1}
    assert recipe.promises
    for promise in recipe.promises:
        assert promise.metric in known, promise
        defined = "eval/judge/<part>" if "/judge/" in promise.metric else promise.metric
        if defined in METRICS:
            assert promise.stage in METRICS[defined].stages


def test_the_reward_of_the_recipe_of_dpo_is_what_the_judge_calls_gold() -> None:
    """It is read by the evaluation alone."""
    [reward] = settings_of(read_recipe(RECIPES / "dpo"))["eval_policy"].reward.values()
    gold = load_object(reward.path, "reward.path", "function", callable)
    judge = load_judge(f"{RECIPES / 'quickstart' / 'judge.py'}:judge")
    turns = [{"role": "user", "content": "What is the capital of Australia?"}]
    answers = ["Canberra is the capital of Australia.", "Sydney.", ""]
    found = gold(["?"] * 3, answers, [turns] * 3)
    assert found == [judge({"messages": turns}, answer, True)["gold"] for answer in answers]
    assert len({*found}) > 1


def test_a_mistake_in_a_recipe_is_named(kitchen: Kitchen) -> None:
    for changes, named in (
        ({"steps": {"sft": ["x={folder}/a"]}}, "recipe.steps.sft is 'x={folder}/a'; allowed: no"),
        ({"steps": {"dpo@three": []}}, "recipe.steps is 'dpo@three'; allowed: sft, rm, ppo"),
        ({"overrides": ["sft.lrr=1"]}, "recipe.yaml: sft.lrr is not a known key"),
    ):
        kitchen.write(**changes)
        assert named in kitchen.cook().error
    assert kitchen.ran == []


# Stages that are run more than once, as jobs of the run.

STEPS = ("sft", "rank@one", "dpo@one", "dpo@two")


def overrides(
    step: str, *given: str, own: Sequence[str] = (), job: str | None = None,
    folder: Path = Path("/out/my run"),
) -> tuple[str, ...]:  # fmt: skip
    common = ("data=small", "dpo.beta=0.5")
    recipe = Recipe(title="", stages=STEPS, program=None, overrides=common, steps={step: own},
                    promises=(), next=())  # fmt: skip
    return step_overrides(recipe, step, given, job, folder)


def test_overrides_of_a_step() -> None:
    assert overrides("sft") == ("stage=sft", "data=small")
    assert overrides("dpo@two") == ("stage=dpo", "data=small", "dpo.beta=0.5", "job='two'")
    own = ["dpo.beta=0.2", "data.preferences.train={folder}/one/rank/final/preferences.jsonl"]
    source = "data.preferences.train='/out/my run/one/rank/final/preferences.jsonl'"
    assert overrides("dpo@one", own=own) == (
        "stage=dpo", "data=small", "dpo.beta=0.2", source, "job='one'",
    )  # fmt: skip
    given = ("dpo.beta=0.1", "rank.pairs=all", "data.preferences.train=mine.jsonl")
    assert overrides("dpo@one", *given, own=own) == (
        "stage=dpo", "data=small", "dpo.beta=0.1", source, "job='one'",
    )  # fmt: skip
    assert overrides("dpo@one", job="kl=0.1")[-1] == "job='kl=0.1/one'"
    assert "advantage=rloo" not in overrides("sft", "advantage=rloo")


@pytest.mark.parametrize("name", ["a,b", "it's", "(a)[b]{c}"])
def test_folders_of_any_name(name: str) -> None:
    words = overrides("dpo@one", own=["policy.checkpoint={folder}/one"], folder=Path("/out") / name)
    (parsed,) = [o for o in parse_overrides(words) if o.key_or_group == "policy.checkpoint"]
    assert parsed.value() == f"/out/{name}/one"


def test_data_of_an_earlier_step_are_not_looked_for_before_it() -> None:
    def reads(source: str | None) -> Path | None:
        data = {"preferences": {"train": source}}
        settings: Any = SimpleNamespace(
            tree={"data": data}, definition=SimpleNamespace(data="preferences")
        )
        return data_of_run(settings, Path("/out/run"))

    made = "/out/run/one/rank/final/preferences.jsonl"
    assert reads(made) == Path(made)
    assert not reads("/out/runs/preferences.jsonl")
    assert not reads("org/name:train")
    assert not reads(None)
