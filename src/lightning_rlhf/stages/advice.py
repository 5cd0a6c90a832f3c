"""Advice for the errors that end a training."""

from lightning_rlhf.callbacks.checkpoints import divergence_advice
from lightning_rlhf.core.errors import LogitsError, NotFiniteError, PolicyLogitsError, TrainingError


def advise(error: TrainingError, stage: str = "ppo") -> TrainingError:
    """Return the error with advice from its facts; existing advice is kept.

    stage: name of the section whose keys the advice names.
    """
    if error.advice is None:
        error.advice = advice(error, stage)
        if isinstance(error, NotFiniteError) and error.batch is not None:
            error.advice = f"{error.advice}. {error.batch}"
    return error


def advice(error: TrainingError, stage: str = "ppo") -> str | None:
    """Return what to do about an error; None where its message already states it."""
    match error:
        case NotFiniteError(rewards_overflow=True):
            return (
                "The rewards were infinite, or their squares were, before the first update of the "
                f"iteration: the reward is too large. {stage}.score_clip bounds it, and so does "
                "the clip of a reward's component. Start over (overwrite=true or job=NAME) with one"
            )
        case NotFiniteError():
            return divergence_advice(error.stage, error.made)
        case PolicyLogitsError(iterations=0):
            return "No update was made yet: so is the model that the run starts from"
        case PolicyLogitsError():
            return (
                f"{_not_made(error.nonfinite)}A smaller {stage}.lr may hold the model: start over "
                "(overwrite=true or job=NAME) with one, since a resumed run keeps its numbers"
            )
        case LogitsError():
            return "Where it was trained until here, a smaller learning rate may hold it"
        case _:
            return None


def _not_made(updates: int) -> str:
    """Return a sentence on the preceding updates that were not made; an empty text for none."""
    if updates == 0:
        return ""
    last, were = ("update", "was") if updates == 1 else (f"{updates} updates", "were")
    return (
        f"The last {last} before it had a loss or gradient that is not finite, and {were} not "
        "made. "
    )
