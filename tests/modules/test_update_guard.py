"""What goes wrong in an update: too little memory halves the micro-batch, NaN is not followed."""

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rlhf.callbacks.metrics import update_metrics
from lightning_rlhf.core.errors import RewardError, TrainingError
from lightning_rlhf.core.records import DecodedResponses, Prompts, Record, SampledResponses, Scores
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.supervised import RewardModule
from lightning_rlhf.rewards.weighted import Reward
from lightning_rlhf.rollout import collector
from lightning_rlhf.rollout.score import Critic
from lightning_rlhf.stages.fit import advise

from ..matrix import matrix
from .conftest import Outputs, changed, fit, parameters, prompts, within_fit
from .experiences import Make, learn, on_policy, update
from .test_supervised import STAGES

Build = Callable[[int], L.LightningModule]
PPO = {"ppo": "head", "ppo with a critic of its own": "adapter"}


@pytest.fixture(params=matrix(["sft", "rm", *PPO], "sft", "ppo"))
def stage(request: pytest.FixtureRequest, make_ppo: Make) -> tuple[Build, Record, int]:
    """What builds the module for a size of its micro-batches, a batch, and the whole of it."""
    if (critic := PPO.get(request.param)) is not None:
        sizes = {"minibatch_size": 8, "ppo_epochs": 1, "critic": critic}
        return lambda n: make_ppo(microbatch_size=n, **sizes), prompts(8), 8
    build, batch, _ = STAGES[request.param]
    return lambda n: build(microbatch_size=n), batch(), 6


@contextmanager
def little_memory(rows: int, said: str, *, learns: bool = False) -> Iterator[list[int]]:
    """Inside, so many rows are read at a time at most; which are asked for; there is one warning.

    learns: whether reading without a gradient needs no memory.
    """
    asked: list[int] = []
    hidden = Roles.hidden_at

    def read(roles: Roles, tokens: Tensor, *args: Any) -> Tensor:
        if learns and not torch.is_grad_enabled():
            return hidden(roles, tokens, *args)
        asked.append(len(tokens))
        if len(tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(roles, tokens, *args)

    with patch.object(Roles, "hidden_at", read), pytest.warns(UserWarning, match=said) as caught:
        yield asked
    assert sum("out of memory" in str(w.message) for w in caught) == 1


@pytest.fixture
def scored_row_by_row() -> Iterator[None]:
    """What PPO learns from has the same bits, however many rows an update takes at once."""
    all_values, scored = Critic.all_values, collector.score

    def row_by_row(roles: Roles, decoded: DecodedResponses, reward: Reward, **keys: Any) -> Scores:
        reward = replace(reward, sources=(lambda r: r.rollout.tokens.float().mean(dim=1),))
        return scored(roles, decoded, reward, **keys | {"batch_size": 1})

    with (
        patch.object(Critic, "all_values", lambda critic, batch, _: all_values(critic, batch, 1)),
        patch.object(collector, "score", row_by_row),
    ):
        yield


@pytest.mark.usefixtures("scored_row_by_row")
def test_too_little_memory_gives_what_smaller_micro_batches_give(
    stage: tuple[Build, Record, int],
) -> None:
    build, batch, whole = stage
    small, large = build(whole // 2), build(whole)
    expected, found = Outputs(), Outputs()
    rows = whole // 2 * (2 if isinstance(small, RewardModule) else 1)  # two sides a pair
    fit(small, [batch, batch], [expected])
    said = rf"\.microbatch_size is {whole // 2} from now on"
    with little_memory(rows, said, learns=True) as asked:
        fit(large, [batch, batch], [found])
    # The second batch starts with what was found to fit.
    assert sum(count > rows for count in asked) == 1
    assert not changed(parameters(small), parameters(large))
    for one, other in zip(expected.grads, found.grads, strict=True):
        assert one
        assert not changed(one, other)


def test_memory_that_runs_out_behind_the_first_micro_batch_leaves_no_trace(make_ppo: Make) -> None:
    small, large = make_ppo(microbatch_size=2), make_ppo(microbatch_size=4, minibatch_size=8)
    small.config = replace(small.config, minibatch_size=8)
    experience = on_policy(small)
    expected = within_fit(small, lambda: update(small, experience))
    calls, add_gradient = [], large.add_gradient

    def fails_once(loss: Tensor) -> Tensor:
        calls.append(loss)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return add_gradient(loss)

    large.add_gradient = fails_once  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="is 2 from"):
        found = within_fit(large, lambda: update(large, experience))
    assert len(calls) == 2 + 4
    assert found == expected
    assert not changed(parameters(small), parameters(large))


def test_annotation_halves_once_in_a_run_and_a_checkpoint_keeps_it(make_ppo: Make) -> None:
    module = make_ppo(rollout="hf")
    expected = module.collector.roll_out(prompts(8), module.generator(0, 0))
    with little_memory(4, "rows annotated at a time is 4 from now on") as asked:
        found, _ = (module.collector.roll_out(prompts(8), module.generator(0, n)) for n in range(2))
    assert asked == [8, 4, 4, 4, 4]
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert module.microbatch.rows == 2  # that of updates stays
    resumed = make_ppo(rollout="hf")
    resumed.on_load_checkpoint(saved(module))
    assert resumed.collector.annotation_rows.rows == 4


def test_scoring_halves_too(make_ppo: Make) -> None:
    module = make_ppo(microbatch_size=8, minibatch_size=8)
    rollout = module.collector.roll_out(prompts(8), module.generator(0, 0))
    decoded = module.collector.decode(rollout, "train")
    reward = module.collector.reward
    module.collector.reward = replace(reward, sources=(lambda decoded: torch.zeros(8),))
    expected = module.collector.score(decoded).ref_logprobs
    with little_memory(4, "is 4 from now on") as asked:
        found = module.collector.score(decoded).ref_logprobs
    assert asked == [8, 4, 4]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def saved(module: Any) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def test_validation_halves_too() -> None:
    build, batch, _ = STAGES["rm"]
    module, sides = build(microbatch_size=6), 2
    with torch.no_grad():
        expected = module.validation_step(batch(), 0)
        with little_memory(4 * sides, r"rm\.microbatch_size is 3 from now on") as asked:
            found = module.validation_step(batch(), 0)
    assert asked == [6 * sides, 3 * sides, 3 * sides]
    assert module.microbatch.rows == 3
    for key, value in vars(expected).items():
        torch.testing.assert_close(getattr(found, key), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rollout", ["native", "hf"])
def test_fewer_responses_are_sampled_at_a_time_where_the_memory_runs_out(
    make_ppo: Make, rollout: str
) -> None:
    module = make_ppo(samples_per_prompt=2, rollout=rollout)
    sampler, batches = module.collector.sampler, []
    sample = sampler.sample

    def limited(given: Prompts, *args: Any) -> SampledResponses:
        batches.append(len(args[2]))  # of the share
        if batches[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sample(given, *args)

    batch, drawn = prompts(5), [module.generator(0, 0) for _ in range(2)]
    whole = module.collector.roll_out(batch, drawn[0], samples_per_prompt=2)
    with (
        patch.object(sampler, "sample", limited),
        pytest.warns(UserWarning, match=r"ppo\.generation_batch_size is 4 from now on"),
    ):
        found = module.collector.roll_out(batch, drawn[1], samples_per_prompt=2)
    assert batches == [4, 2, 2, 1]
    assert found.index.tolist() == whole.index.tolist()
    assert found.tokens[found.mask].tolist() == whole.tokens[whole.mask].tolist()
    torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
    assert drawn[0].get_state().equal(drawn[1].get_state())


def test_one_response_that_cannot_be_sampled_ends_the_run(make_ppo: Make) -> None:
    module, full = make_ppo(), torch.OutOfMemoryError("CUDA out of memory.")
    with (
        patch.object(module.collector.sampler, "sample", side_effect=full),
        pytest.warns(UserWarning, match="generation_batch_size is 1 from now on"),
        pytest.raises(TrainingError, match=r"one row at a time \(ppo.generation_batch_size\)"),
    ):
        module.collector.roll_out(prompts(4), module.generator(0, 0))


@pytest.mark.parametrize(("iteration", "nonfinite", "expected"), [
    (0, 0, "iteration 1: {}. No update was made yet: so is the model that the run starts from"),
    (4, 2, "iteration 5: {}. The last 2 updates before it had a loss or gradient that is not "
        "finite and made no change. A smaller ppo.lr may"),
])  # fmt: skip
def test_a_model_that_training_broke_names_iteration_and_key(
    make_ppo: Make, iteration: int, nonfinite: int, expected: str
) -> None:
    module = make_ppo()
    module.iteration, module.nonfinite = iteration, nonfinite
    weight = next(p for p in module.parameters() if p.requires_grad)
    with torch.no_grad():
        weight.fill_(math.nan)
    logits = "the model's logits are NaN or infinite, and nothing can be sampled from it"
    with pytest.raises(TrainingError) as caught:
        module.make_experience(module.roll_out(prompts(4), module.generator(0, 0)))
    assert str(advise(caught.value)).startswith(expected.format(logits))
    before = f"iteration {iteration + 1}:", f"the evaluation after iteration {iteration}:"
    with pytest.raises(TrainingError) as caught:
        module.validation_step(prompts(4), 0)
    assert str(advise(caught.value)).startswith(expected.format(logits).replace(*before))


def test_a_reward_that_is_no_number_names_the_iteration(make_ppo: Make) -> None:
    module = make_ppo(reward=lambda decoded: [math.nan] * len(decoded))
    module.iteration = 6
    with pytest.raises(RewardError, match=r"^iteration 7: reward 'reward' gave nan for the resp"):
        module.make_experience(module.roll_out(prompts(4), module.generator(0, 0)))


class Spoiled(Callback):
    """Makes one trained weight NaN before some batches, and itself again behind them."""

    def __init__(self, batches: set[int]) -> None:
        self.batches = batches
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.before.append(parameters(pl_module))
        if batch_idx in self.batches:
            self.name, self.weight = next(
                (n, p) for n, p in pl_module.named_parameters() if p.requires_grad
            )
            self.held = self.weight.detach().clone()
            with torch.no_grad():
                self.weight.view(-1)[0] = math.nan

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx in self.batches:
            with torch.no_grad():
                self.weight.copy_(self.held)
        self.after.append(parameters(pl_module))


@pytest.fixture(params=["sft", "rm"])
def supervised(request: pytest.FixtureRequest) -> tuple[Any, Record]:
    build, batch, _ = STAGES[request.param]
    return build(), batch()


def test_an_update_that_is_not_finite_is_not_made_and_the_first_of_a_row_is_reported(
    supervised: tuple[Any, Record],
) -> None:
    """Of the second, the third and the fifth: the third only goes on with what was caught."""
    module, batch = supervised
    spoiled, outputs = Spoiled({1, 2, 4}), Outputs()
    with pytest.warns(UserWarning, match="was not made") as caught:
        fit(module, [batch] * 6, [spoiled, outputs])
    made = [bool(changed(b, a)) for b, a in zip(spoiled.before, spoiled.after, strict=True)]
    assert made == [True, False, False, True, False, True]
    assert [step.is_made for step in outputs.steps] == made
    assert (module.nonfinite, module.iteration) == (0, 6)  # time goes on
    said = [str(w.message) for w in caught if "was not made" in str(w.message)]
    assert len(said) == 2
    for line, before in zip(said, (1, 2), strict=True):
        assert re.fullmatch(
            rf"an update was not made, after {before} that were: its loss is \S+ and the norm of "
            rf"its gradient nan; update/nonfinite counts them, {module.stage}\."
            "max_nonfinite=3 in a row end the run",
            line,
        )


def test_the_run_ends_at_the_last_of_several_in_a_row(supervised: tuple[Any, Record]) -> None:
    """max_nonfinite is 3: of the second to the fifth only the last two are behind each other."""
    module, batch = supervised
    fit(module, [batch] * 6, [Spoiled({1, 2, 4, 5})])
    stage = module.stage
    with pytest.raises(TrainingError, match=rf"^3 updates in a row \({stage}.max_nonf.*nan"):
        fit(module, [batch] * 6, [Spoiled({1, 2, 3})])


@pytest.mark.parametrize(("what", "size", "said"), [
    ("rewards", 1e38, "the reward is too large. ppo.score_clip bounds it"),
    ("rewards", 1e3, "No update was made before them"),
    ("kl", 1e38, "No update was made before them"),
])  # fmt: skip
def test_a_reward_that_is_too_large_is_reported(
    make_ppo: Make, what: str, size: float, said: str
) -> None:
    """1e38 is a number of fp32, its square is not; where the KL is as large, it did it."""
    module = make_ppo()
    experience = on_policy(module)
    changes = {"rewards": 1e38, "advantages": math.nan, what: size}
    spoiled = {k: torch.full_like(getattr(experience, k), x) for k, x in changes.items()}
    experience = replace(experience, **spoiled)
    with pytest.raises(TrainingError) as caught:
        within_fit(module, lambda: learn(module, experience, module.generator(0, 1)))
    assert re.search(f"^3 updates in a row.*{re.escape(said)}", str(advise(caught.value)))


def test_ppo_goes_on_from_the_count_and_the_size_of_a_checkpoint(make_ppo: Make) -> None:
    module, resumed = make_ppo(), make_ppo()
    fit(module, [prompts()])
    module.nonfinite, module.microbatch.rows = 2, 1
    checkpoint = saved(module)
    assert (resumed.nonfinite, resumed.microbatch.rows) == (0, 2)
    resumed.on_load_checkpoint(checkpoint)
    assert (resumed.nonfinite, resumed.microbatch.rows) == (2, 1)


@pytest.mark.parametrize(("what", "value"), [("returns", math.nan), ("old_logprobs", -1e3)])
def test_ppo_counts_a_minibatch_that_is_not_finite_and_learns_from_the_others(
    make_ppo: Make, what: str, value: float
) -> None:
    """One response is spoiled, which is in one minibatch of each of two epochs.

    A log-probability of -1000 when it was sampled makes a ratio of e^1000, which is infinite.
    """
    module = make_ppo(minibatch_size=4, ppo_epochs=2, max_ratio=1e3)
    experience = on_policy(module)
    spoiled = getattr(experience, what).clone()
    spoiled[3, 0] = value
    experience, before = replace(experience, **{what: spoiled}), parameters(module)
    updates = within_fit(module, lambda: learn(module, experience, module.generator(0, 1)))
    assert sum(u.nonfinite.item() for u in updates) == 2
    assert len(updates) == 4
    assert all(p.isfinite().all() for p in parameters(module).values())
    assert changed(before, parameters(module))
    metrics = update_metrics(updates)
    assert metrics["update/nonfinite"] == 2
    assert metrics["update/steps"] == 2
    assert metrics["update/stopped"] == metrics["update/skipped"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_rows_of_a_batch_one_by_one(supervised: tuple[Any, Record]) -> None:
    """Each as the module computes a batch of it alone; nothing is left behind."""
    module, batch = supervised
    found, before = module.row_losses(batch), parameters(module)
    assert found.shape == (6,)
    for i, row in enumerate(batch.split(1)):
        outputs = Outputs()
        alone = copy.deepcopy(module)
        fit(alone, [row], [outputs])
        torch.testing.assert_close(found[i], outputs.steps[0].loss, rtol=1e-5, atol=1e-7)
    assert not changed(before, parameters(module))
    assert all(p.grad is None for p in module.parameters())
