"""record=true, and lightning-rlhf replay."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from lightning_rlhf.callbacks.digest import parameters_digest
from lightning_rlhf.callbacks.recorder import NonFiniteDump
from lightning_rlhf.core.errors import StorageError
from lightning_rlhf.core.types import PPOTerms
from lightning_rlhf.data.rollouts import (
    file_of,
    read_recorded,
    recorded_iterations,
    weights_of,
    write_recorded,
)
from lightning_rlhf.modules import ppo
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.replay import run_updates as replay_run
from lightning_rlhf.replay.plan import plan_replay, settings_of
from lightning_rlhf.stages.paths import HOME

from .conftest import TRAIN_PY, Outcome, Workplace, given, rows, tree, weights

VARIANTS = {
    "adapter": ["ppo.critic=adapter", "ppo.critic_init=reward", "ppo.critic_warmup=1",
                "ppo.kl_control=adaptive", "ppo.kl_horizon=80", "ppo.kl_target=0.01",
                "ppo.score_normalization=running", "ppo.microbatch_size=4"],
    "model": ["ppo.critic=model", "ppo.rollout=hf", "ppo.kl_control=linear",
              "ppo.whiten_advantages=minibatch", "ppo.whiten_rewards=true"],
    "rloo": ["advantage=rloo", "ppo.target_kl=1e-3", "ppo.kl_estimator=full", "ppo.kl_in=loss"],
    "hybrid": ["reward=random", "policy.checkpoint=base", "trainer.precision=bf16-mixed",
               "model.from_config.model_type=qwen3_5_text", "model.from_config.num_hidden_layers=2",
               "+model.from_config.layer_types=[linear_attention,full_attention]",
               "+model.from_config.linear_num_key_heads=2",
               "+model.from_config.linear_num_value_heads=2",
               "+model.from_config.linear_key_head_dim=8",
               "+model.from_config.linear_value_head_dim=8"],
}  # fmt: skip

RECORDING = ("record=true", "ppo.checkpoint_every=2", "ppo.val_every=3", "ppo.max_nonfinite=2")


@pytest.fixture(scope="module")
def place(pipeline: Workplace) -> Workplace:
    """The pipeline's workplace in which run=recorded left a checkpoint after two of three."""
    pipeline.mini("stage=ppo", "run=recorded", *RECORDING, *given(pipeline)).succeeded  # noqa: B018
    return pipeline


@pytest.fixture
def run(tmp_path: Path, place: Workplace) -> Path:
    """A copy of the recorded run, whose parents stay where they are."""
    folder = tmp_path / "outputs" / "recorded" / "mini" / "ppo"
    shutil.copytree(place.stage("ppo", "recorded"), folder)
    return folder


def replay(place: Workplace, run: Path, iteration: int, *options: str) -> Outcome:
    return place.call("replay", str(run), "--iteration", str(iteration), *options)


SAME = r"iteration {} is the recorded one bit for bit: {} updates, and the parameters after it"


def check_same(outcome: Outcome, iteration: int, updates: int) -> None:
    assert re.search(SAME.format(iteration, updates), outcome.succeeded.out), outcome.out


# Recorded.


def test_a_recorded_run_is_the_same_run(pipeline: Workplace) -> None:
    pipeline.mini("stage=ppo", "run=same", "record=true", *given(pipeline)).succeeded  # noqa: B018
    plain, recorded = pipeline.stage("ppo"), pipeline.stage("ppo", "same")
    assert weights(recorded) == weights(plain)
    assert rows(recorded) == rows(plain)
    assert recorded_iterations(recorded) == [1, 2, 3]
    assert not (plain / "rollouts").exists()
    for iteration in (1, 2, 3):
        shown = read_recorded(file_of(recorded, iteration))
        table = {int(row["step"]): row for row in rows(recorded)}[iteration]
        assert float(table["reward_mean"]) == pytest.approx(shown.experience.score.mean().item())
        losses = [update["loss"] for update in shown.updates or ()]
        assert float(table["ppo_loss"]) == pytest.approx(sum(losses) / 4)  # 2 epochs, 2 minibatches
        assert float(table["update/kl_coef"]) == shown.kl_coef


def test_a_record_says_what_was_said(place: Workplace) -> None:
    """samples/train.jsonl holds the first four responses of each iteration."""
    run = place.stage("ppo", "recorded")
    samples = pandas.read_json(run / "samples" / "train.jsonl", lines=True)
    for iteration in (1, 2, 3):
        table = pandas.read_parquet(file_of(run, iteration))[:4]
        expected = samples[samples["iteration"] == iteration]
        assert list(table["prompt"]) == list(expected["prompt"])
        assert list(table["response"]) == list(expected["response"])
        assert list(table["score"]) == pytest.approx(list(expected["score"]))
        assert [kl.sum() for kl in table["kl"]] == pytest.approx(list(expected["kl"]), abs=1e-6)
        assert [part["head"] for part in table["parts"]] == list(table["score"])


def test_the_example_in_the_docs_reads_it(
    place: Workplace, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = re.search(r"```python\n(.*?)```", (HOME / "docs" / "replay.md").read_text(), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(run.parents[3])
    path = "outputs/default/tiny/ppo/rollouts/000040.parquet"
    assert path in code[1]
    names: dict[str, Any] = {}
    exec(code[1].replace(path, "outputs/recorded/mini/ppo/rollouts/000002.parquet"), names)
    experience = read_recorded(file_of(run, 2)).experience
    assert len(names["tokens"]) == int(experience.response_mask.sum())
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_other_stages_have_no_rollouts(finished: Workplace) -> None:
    finished.mini("stage=sft", "record=true", "run=next").succeeded  # noqa: B018
    assert not (finished.stage("sft", "next") / "rollouts").exists()


def test_a_resumed_run_forgets_what_it_does_again(place: Workplace, run: Path) -> None:
    """Iteration 3, which is behind the checkpoint, and 9, which the run never had."""
    before = tree(run / "rollouts")
    shutil.copy(file_of(run, 3), file_of(run, 9))
    weights_of(run, 9).write_bytes(b"")
    shutil.rmtree(run / "final")
    file_of(run, 3).write_bytes(b"")
    again = ["run=recorded", *RECORDING, f"outputs={run.parents[2]}", "resume=2"]
    place.mini("stage=ppo", *again, *given(place)).succeeded  # noqa: B018
    assert tree(run / "rollouts") == before


# Replayed.


@pytest.mark.parametrize(("iteration", "origin"), [(2, "the start of the run"), (3, ".ckpt")])
def test_an_update_is_replayed_bit_for_bit(
    place: Workplace, run: Path, iteration: int, origin: str
) -> None:
    outcome = replay(place, run, iteration)
    check_same(outcome, iteration, 4)
    first = outcome.out.splitlines()[0]
    assert first.startswith(f"replaying {iteration if iteration == 2 else 1} of {iteration}")
    assert first.endswith(origin)
    assert "Warning" not in outcome.err


def test_only_the_checkpoint_that_it_starts_from_has_to_be_whole(run: Path) -> None:
    """Of the others the name tells; the best one is left out."""
    checkpoints = run / "checkpoints"
    shutil.copy(checkpoints / "000002.ckpt", checkpoints / "000001.ckpt")
    for path in (checkpoints / "000003.ckpt", checkpoints / "best.ckpt"):
        path.unlink()
        path.write_bytes(b"damaged")
    assert plan_replay(run, settings_of(run), 1).checkpoint is None
    assert plan_replay(run, settings_of(run), 3).checkpoint == checkpoints / "000002.ckpt"


def test_the_best_checkpoint_may_be_the_latest(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "000002.ckpt").replace(checkpoints / "best.ckpt")
    assert plan_replay(run, settings_of(run), 3).checkpoint == checkpoints / "best.ckpt"
    assert plan_replay(run, settings_of(run), 2).checkpoint is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_ppo_learns_with(finished: Workplace, variant: str) -> None:
    """From elsewhere: earlier stages are found where the run's folder says, from the start."""
    command = ["stage=ppo", "record=true", "ppo.iterations=2", *VARIANTS[variant]]
    finished.mini(*command, f"job={variant}").succeeded  # noqa: B018
    run = finished.outputs / "default" / "mini" / variant / "ppo"
    shutil.rmtree(run / "checkpoints")
    updates = read_recorded(file_of(run, 2)).updates or ()
    check_same(replay(Workplace(finished.folder.parent), run, 2), 2, len(updates))


def test_nothing_is_sampled_and_no_reward_is_asked(
    place: Workplace, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("it collects")

    monkeypatch.setattr("lightning_rlhf.modules.ppo.PPOModule.collect", refuse)
    monkeypatch.setattr("lightning_rlhf.stages.reward.build_rewards.head_source", refuse)
    check_same(replay(place, run, 1), 1, 4)


def test_the_program_from_elsewhere(place: Workplace) -> None:
    inside = Workplace(place.stage("ppo", "recorded"))
    check_same(inside.process(TRAIN_PY, "replay", ".", "--iteration", "1"), 1, 4)


def rewritten(run: Path, iteration: int, **changes: object) -> None:
    path = file_of(run, iteration)
    write_recorded(path, replace(read_recorded(path), **changes))  # type: ignore[arg-type]


def with_one_logprob_changed(run: Path, iteration: int) -> None:
    experience = read_recorded(file_of(run, iteration)).experience
    logprobs = experience.old_logprobs.clone()
    logprobs[0, 0] += 0.01
    rewritten(run, iteration, experience=replace(experience, old_logprobs=logprobs))


def test_one_logprob_that_was_changed_is_noticed(place: Workplace, run: Path) -> None:
    with_one_logprob_changed(run, 2)
    outcome = replay(place, run, 2)
    assert outcome.status == 1
    last = outcome.out.splitlines()[-1]
    assert last.startswith("iteration 2 is not the recorded one: the parameters at the end of")
    assert re.search(r"loss of update [1-4] of iteration 2 is \S+, was ", last)
    assert "recorded with" not in last  # it was the same machine


def test_a_change_on_the_way_is_noticed(place: Workplace, run: Path) -> None:
    with_one_logprob_changed(run, 1)
    outcome = replay(place, run, 2)
    assert outcome.status == 1
    assert "the parameters at the end of iteration 1" in outcome.out.splitlines()[-1]


CHANGED = {
    "kl_coef": ({"kl_coef": 0.5}, "kl_coef of iteration 1 is 0.05, was 0.5"),
    "parameters": ({"parameters": "0" * 64}, "the parameters at the end of iteration 1"),
    "updates": ({"updates": []}, "4 updates of iteration 1, were 0"),
    "shuffle": (
        {"shuffle": torch.Generator().manual_seed(1).get_state()}, "of update 1 of iteration 1",
    ),
    "machine": (
        {"parameters": "0" * 64, "machine": {"torch": "1.0"}}, "recorded with torch 1.0, here",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fact", CHANGED)
def test_what_differs_is_named(place: Workplace, run: Path, fact: str) -> None:
    """Each of the facts beside the columns."""
    changes, message = CHANGED[fact]
    rewritten(run, 1, **changes)
    outcome = replay(place, run, 1)
    assert outcome.status == 1
    assert message in outcome.out.splitlines()[-1]


# Broken off.


def test_a_batch_that_broke_the_run_off_is_replayed(place: Workplace, run: Path) -> None:
    """It alone was saved, without an outcome, and the checkpoint stands right before it."""
    for iteration in (1, 2):
        file_of(run, iteration).unlink()
    experience = read_recorded(file_of(run, 3)).experience
    broken = replace(experience, advantages=experience.advantages * torch.nan)
    rewritten(run, 3, experience=broken, updates=None, parameters=None)
    outcome = replay(place, run, 3).succeeded
    last = outcome.out.splitlines()[-1]
    assert last.startswith("iteration 3 broke the run off, so that there is no outcome")
    assert "2 updates in a row (ppo.max_nonfinite)" in last
    tokens = int(experience.response_mask.sum())
    assert last.endswith(f"there were not finite already: {tokens} of {tokens} advantages")
    assert outcome.out.splitlines()[2].startswith("response 0:")  # before those that changed
    assert "nan" in (run / "replay_3.html").read_text()


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """spoil(n): the critic spoils the loss of every update after the n-th."""

    def arrange(good: int) -> None:
        calls, whole = itertools.count(1), ppo.ppo_terms

        def spoiled(*args: Any, **keys: Any) -> PPOTerms:
            terms = whole(*args, **keys)
            return replace(terms, loss=terms.loss * (torch.nan if next(calls) > good else 1.0))

        monkeypatch.setattr(ppo, "ppo_terms", spoiled)

    return arrange


BREAKING = (
    "stage=ppo", "run=next", "ppo.max_nonfinite=2", "ppo.checkpoint_every=10",
    "ppo.microbatch_size=4",  # a minibatch: one loss is one update
)  # fmt: skip
KEPT = "kept for `lightning-rlhf replay outputs/next/mini/ppo --iteration 2`: "


def test_what_no_update_can_be_made_of_is_kept(
    finished: Workplace, spoil: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that records nothing, from the first of the four updates of iteration 2."""
    run = finished.stage("ppo", "next")
    spoil(4)
    command = [*BREAKING, *given(finished)]
    outcome = finished.mini(*command)
    assert "2 updates in a row (ppo.max_nonfinite)" in outcome.err
    assert KEPT in outcome.out
    assert recorded_iterations(run) == [2]
    monkeypatch.undo()
    # No update was made, so that the checkpoint is the one before them, and all can be made now.
    assert "no outcome to compare with" in replay(finished, run, 2).succeeded.out
    finished.mini(*command, "resume=true").succeeded  # noqa: B018
    assert recorded_iterations(run) == []


@pytest.mark.parametrize("record", [False, True])
def test_how_to_replay_is_said_where_it_can_be(
    finished: Workplace, spoil: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, record: bool
) -> None:
    """From the second update of iteration 2, so that no checkpoint is right before it."""
    run = finished.stage("ppo", "next")
    spoil(5)
    outcome = finished.mini(*BREAKING, f"record={record}", *given(finished))
    assert "2 updates in a row (ppo.max_nonfinite)" in outcome.err
    assert (KEPT in outcome.out) == record
    told = f"kept: {file_of(Path('outputs/next/mini/ppo'), 2)}. Some of its updates were made: "
    assert (told in outcome.out) != record
    assert ("the way there leads over 1, not recorded" in outcome.out) != record
    monkeypatch.undo()
    again = replay(finished, run, 2).succeeded.out
    assert ("no outcome to compare with" in again) == record
    assert ("broke the run off after 1 update of it: no update was run" in again) != record
    assert "bit for bit" not in again


def test_a_batch_is_shown_with_the_weights_that_the_run_ended_with(
    finished: Workplace, spoil: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two of the four updates of iteration 2; they are those of no checkpoint."""
    ended, shown = [], []
    on_exception, predict_step = NonFiniteDump.on_exception, PPOModule.predict_step

    def ending(self: NonFiniteDump, trainer: Any, module: PPOModule, error: BaseException) -> None:
        ended.append(parameters_digest(module.state_dict()))
        on_exception(self, trainer, module, error)

    def showing(self: PPOModule, *args: Any) -> Any:
        shown.append(parameters_digest(self.state_dict()))
        return predict_step(self, *args)

    run = finished.stage("ppo", "next")
    with monkeypatch.context() as patched:
        patched.setattr(NonFiniteDump, "on_exception", ending)
        spoil(6)
        finished.mini(*BREAKING, *given(finished))
    monkeypatch.undo()
    monkeypatch.setattr(PPOModule, "predict_step", showing)
    last = replay(finished, run, 2).succeeded.out.splitlines()[-1]
    assert last.startswith("iteration 2 broke the run off after 2 updates of it: ")
    assert shown == ended
    assert not (run / "checkpoints").exists()


@pytest.mark.usefixtures("no_model")
def test_weights_that_are_damaged_are_named(place: Workplace, run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    file_of(run, 1).unlink()
    weights_of(run, 3).write_bytes(b"damaged")
    assert replay(place, run, 3).error.startswith(f"{weights_of(run, 3)} cannot be read: ")


def test_a_batch_that_finds_no_room_does_not_hide_why_the_run_ended(
    finished: Workplace, spoil: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise StorageError("no room")

    spoil(4)
    monkeypatch.setattr("lightning_rlhf.callbacks.recorder.write_recorded", full)
    outcome = finished.mini(*BREAKING, *given(finished))
    assert "2 updates in a row (ppo.max_nonfinite)" in outcome.error
    assert "the batch of iteration 2 is not kept: no room" in outcome.out
    assert KEPT not in outcome.out


# Shown.


def test_without_an_iteration_it_is_the_newest(place: Workplace, run: Path) -> None:
    outcome = place.call("replay", str(run))
    check_same(outcome, 3, 4)
    assert outcome.out.startswith("iteration 3 is the newest that is recorded; ")
    assert "not finite already" not in outcome.out
    assert "shown: 3 of 8 responses" in outcome.out
    assert (run / "replay_3.html").exists()


def test_the_page_stands_alone(place: Workplace, run: Path) -> None:
    outcome = replay(place, run, 3, "--responses", "8").succeeded
    page = (run / "replay_3.html").read_text()
    assert str(run / "replay_3.html") in outcome.out
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    recorded = read_recorded(file_of(run, 3))
    assert page.count("<section>") == len(recorded.responses) == 8
    tokens = int(recorded.experience.response_mask.sum())
    assert page.count("--advantage: rgb") == tokens
    for row in range(8):
        assert f"response {row}:" in page
        assert f"response {row}:" in outcome.out


def test_a_page_that_does_not_fit(
    place: Workplace, run: Path, largest_file: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The one before it stays."""
    page = run / "replay_1.html"
    page.write_text("before")
    with largest_file(1000):
        error = replay(place, run, 1).error
    assert re.match(
        rf"{page} was not written: File too large\. It needs \d+\.\d kB, and .*ulimit -f", error
    )
    assert page.read_text() == "before"
    assert not list(run.glob("*.tmp"))


def test_the_policy_afterwards_is_the_one_of_the_next_iteration(place: Workplace) -> None:
    """Which sampled iteration 2, where its log-probabilities and values are recorded."""
    run = place.stage("ppo", "recorded")
    plan = plan_replay(run, settings_of(run), 1)
    module, _ = replay_run.rebuilt(plan.settings)
    replay_run.quiet_trainer(plan.settings, []).fit(module, replay_run.Recordings(plan))
    following = read_recorded(file_of(run, 2))
    found = module.predict_step(following, 0)
    expected = following.experience
    torch.testing.assert_close(found.logprobs, expected.old_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.values, expected.old_values, atol=1e-5, rtol=0)
    assert (found.logprobs - expected.ref_logprobs).abs().max() > 1e-3


# Refused, before a model loads.


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model loads")

    monkeypatch.setattr("lightning_rlhf.models.build_roles.load_causal_lm", load)


def no_run(run: Path) -> str:
    (run / "config.json").unlink()
    return f"{run} is no run: it has no config.json"


def no_folder(run: Path) -> str:
    run.rename(run.with_name("older"))
    return (
        f"{run} does not exist; allowed: the folder of a run of stage=ppo, sft or rm, as "
        "outputs/<run>/<model>/ppo; runs beside it: older"
    )


def another_stage(run: Path) -> str:
    config = run / "config.json"
    config.write_text(config.read_text().replace('"stage": "ppo"', '"stage": "eval_reward"'))
    return f"{run} is a run of stage=eval_reward; allowed: one of stage=sft, rm, ppo"


def damaged_config(run: Path) -> str:
    (run / "config.json").write_text("{")
    return f"{run / 'config.json'} is damaged"


def not_recorded(run: Path) -> str:
    shutil.rmtree(run / "rollouts")
    return f"{run / 'rollouts'} holds no recorded iteration; record=true"


def not_this_one(run: Path) -> str:
    file_of(run, 3).unlink()
    return f"iteration 3 of {run} is not recorded; recorded are 1-2"


def not_the_way(run: Path) -> str:
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    file_of(run, 1).unlink()
    return (
        f"iteration 3 of {run} cannot be replayed: the way there from the start leads over 1, not "
        "recorded; recorded are 2-3"
    )


def damaged_record(run: Path) -> str:
    path = file_of(run, 3)
    path.write_bytes(path.read_bytes()[:500])
    return f"{path} cannot be read as an iteration that was recorded: "


def another_parent(run: Path) -> str:
    parents = run / "parents.json"
    digests = json.loads(parents.read_text())
    parents.write_text(json.dumps(digests | {"sft": "0" * 16}))
    return f"{run} cannot be replayed: the models that it was started from are others now"


def damaged_checkpoint(run: Path) -> str:
    path = sorted((run / "checkpoints").iterdir())[0]
    path.write_bytes(path.read_bytes()[:500])
    return f"{path} cannot be read"


def flipped_checkpoint(run: Path) -> str:
    """One bit in the middle, where the tensors are."""
    path = run / "checkpoints" / "000002.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # best.ckpt may be the same file
    path.write_bytes(content)
    return f"{path} cannot be read: "


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "fault",
    [no_run, no_folder, another_stage, damaged_config, not_recorded, not_this_one, not_the_way,
     damaged_record, damaged_checkpoint, flipped_checkpoint, another_parent],
)  # fmt: skip
def test_what_is_wrong_is_one_message(
    place: Workplace, run: Path, fault: Callable[[Path], str]
) -> None:
    message = fault(run)
    assert replay(place, run, 3).error.startswith(message)


@pytest.mark.usefixtures("no_model")
def test_a_message_holds_no_password(place: Workplace, run: Path) -> None:
    config = run / "config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"seed": "http://me:secret@host"}))
    assert "http://***@host" in replay(place, run, 3).error


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("option", ["--iteration", "--responses"])
def test_options_out_of_bounds(place: Workplace, run: Path, option: str) -> None:
    error = place.call("replay", str(run), "--iteration", "1", option, "0").error
    assert error == f"{option} is 0; allowed: a whole number and >= 1"


def test_help_tells_how(place: Workplace) -> None:
    outcome = place.call("replay", "--help")
    assert outcome.status == 0
    for word in ("--iteration", "--responses", "record=true", "replay_N.html"):
        assert word in " ".join(outcome.out.split())
