"""ppo.rollout=path/to/file.py:Class: a sampler from outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.data.rollouts import file_of, read_recorded

from .conftest import Workplace, given, rows

GREEDY = Path(__file__).parent / "greedy.py"


def test_a_sampler_of_the_user_s_own_trains_and_is_replayed(finished: Workplace) -> None:
    command = ["stage=ppo", "run=own", "record=true", "ppo.iterations=2", "ppo.critic_warmup=0"]
    command += [f"ppo.rollout={GREEDY}:Greedy", "ppo.temperature=0.7"]
    finished.mini(*command, *given(finished)).succeeded  # noqa: B018
    folder = finished.stage("ppo", "own")
    trained = [row for row in rows(folder) if "reward_mean" in row]
    assert len(trained) == 2
    for iteration in (1, 2):
        recorded = read_recorded(file_of(folder, iteration))
        experience = recorded.experience
        assert recorded.updates is not None
        # Annotation's log-probabilities are the training model's: nothing has moved yet.
        first = recorded.updates[0]
        assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert first["ratio_mean"] == pytest.approx(1, abs=1e-5)
        # No token is likelier than the greedy one: at least one in the vocabulary's size.
        mask = experience.response_mask
        assert (experience.old_logprobs[mask] < 0).all()
        assert not experience.old_logprobs[~mask].any()
        # The same prompt, drawn twice or more in an iteration, is answered alike.
        answers: dict[int, list[int]] = {}
        for index, tokens, real in zip(
            experience.index.tolist(), experience.responses, mask, strict=True
        ):
            assert answers.setdefault(index, tokens[real].tolist()) == tokens[real].tolist()
    # The critic on the trunk is read too, once it has learned something.
    assert read_recorded(file_of(folder, 2)).experience.old_values.abs().max() > 0
    outcome = finished.call("replay", str(folder), "--iteration", "2")
    assert "is the recorded one bit for bit" in outcome.succeeded.out


@pytest.mark.parametrize(("rollout", "error"), [
    ("server", "ppo.rollout is 'server'; allowed: native, hf, 'path/to/file.py:Class' or "
        "'package.module:Class'"),
    (f"{GREEDY}:Nothing", f"ppo.rollout is '{GREEDY}:Nothing', which has no sample and no is_exact;"
        " allowed: a class with both, see lightning_rlhf.rollout.sampler.Sampler"),
    (f"{GREEDY}x:Greedy", None),
    ("nowhere.py:Greedy", "there is no file"),
])  # fmt: skip
def test_what_is_no_sampler_is_refused_before_a_model_loads(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch, rollout: str, error: str | None
) -> None:
    def loading(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("lightning_rlhf.stages.train_ppo.start_from", loading)
    outcome = finished.mini("stage=ppo", "run=own", f"ppo.rollout={rollout}", *given(finished))
    assert "ppo.rollout is" in outcome.error
    assert (error or "ppo.rollout") in outcome.error


def test_a_sampler_without_its_file_is_refused_before_the_stage_starts(
    finished: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*args: object, **kwargs: object) -> None:
        raise AssertionError("the stage starts")

    monkeypatch.setattr("lightning_rlhf.stages.run.run_in_folder", starts)
    command = ("stage=ppo", "run=own", "ppo.rollout=nowhere.py:Greedy", *given(finished))
    assert "ppo.rollout is 'nowhere.py:Greedy'; there is no file" in finished.mini(*command).error
