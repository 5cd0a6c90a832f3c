"""A reward that cannot be had ends the run, and costs nothing that was learned."""

from pathlib import Path

import pytest

from ..matrix import matrix
from .conftest import Workplace, given, rows, weights
from .test_pipeline import samples


def test_what_fails_before_its_first_step_may_be_corrected(finished: Workplace) -> None:
    """Without a word of what to delete; what was drawn before is gone."""
    rules = finished.folder / "rules.py"
    rules.write_text("def fails(prompts, responses):\n    raise KeyError('x')\n")
    words = ["stage=ppo", "reward=function", f"reward.path={rules}:fails", given(finished)[0]]
    words += ["ppo.iterations=1", "run=early"]
    assert "KeyError" in finished.mini(*words).error
    old = finished.stage("ppo", "early") / "samples" / "old.jsonl"
    old.parent.mkdir(exist_ok=True)
    old.touch()
    mended = finished.folder / "mended.py"
    mended.write_text("def works(prompts, responses):\n    return [1.0] * len(responses)\n")
    words[2] = f"reward.path={mended}:works"
    finished.mini(*words).succeeded  # noqa: B018
    assert not old.exists()


RULES = """
from pathlib import Path

BROKEN = Path(__file__).with_name("broken")
calls = 0


def shorter(prompts, responses):
    global calls
    calls += 1
    if BROKEN.exists() and calls == int(BROKEN.read_text()):
        return [float("nan")] * len(responses)
    return [-len(text) / 10 for text in responses]
"""


def command(place: Workplace, name: str) -> list[str]:
    """PPO on a reward of a module of this name, whose calls start at 0."""
    (place.folder / f"{name}.py").write_text(RULES)
    return [
        "stage=ppo", f"run={name}", "reward=function", f"reward.path={name}.py:shorter",
        given(place)[0], "ppo.checkpoint_every=100", "ppo.val_every=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(pipeline: Workplace) -> Path:
    """The folder of a run whose reward was never away."""
    pipeline.mini(*command(pipeline, "unbroken")).succeeded  # noqa: B018
    return pipeline.stage("ppo", "unbroken")


@pytest.mark.parametrize(("call", "step"), matrix([(2, 0), (4, 2)], (4, 2)))
def test_the_run_is_saved_and_goes_on_as_if_nothing_had_been(
    finished: Workplace, unbroken: Path, call: int, step: int
) -> None:
    """Calls: the evaluation at the start, two iterations, an evaluation, an iteration, the last."""
    words, broken = command(finished, f"away{call}"), finished.folder / "broken"
    broken.write_text(str(call))
    error = finished.mini(*words).error
    where = "iteration 1: " if call == 2 else ""
    assert error.startswith(f"{where}reward 'function' gave nan for the response ")
    assert "allowed: a finite number" in error
    assert "; resume=auto goes on from the checkpoint of step " in error
    folder = finished.stage("ppo", f"away{call}")
    assert (folder / "checkpoints" / f"{step:06d}.ckpt").is_file()

    broken.unlink()
    finished.mini(*words, "resume=true").succeeded  # noqa: B018
    assert weights(folder) == weights(unbroken)
    assert rows(folder) == rows(unbroken)
    assert samples(folder) == samples(unbroken)
