"""Replicas: several processes make the samples, metrics and weights of one."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import optuna
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_rlhf.callbacks.metrics import SharedMetrics
from lightning_rlhf.callbacks.progress import trained as batches_of
from lightning_rlhf.cli.study import PRUNED, TrialReport, open_storage
from lightning_rlhf.core.errors import LogitsError, ProcessEndedError, RewardError
from lightning_rlhf.core.records import DecodedResponses, Experience, Rollout
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.modules.supervised import SFTModule
from lightning_rlhf.parallel import replicas as collectives
from lightning_rlhf.parallel.replicas import ONE, Replicas
from lightning_rlhf.parallel.sharding import mesh

from ..matrix import matrix
from ..processes import replicated
from .conftest import Outputs, fit, parameters, prompts, sft_config, sft_roles
from .experiences import Make
from .test_ptx import with_ptx
from .test_resampling import coarse
from .test_sft import demonstrations
from .test_supervised import STAGES

CASES: dict[str, dict[str, Any]] = {
    "head": {},
    "adapter, running moments, adaptive KL": {
        "critic": "adapter", "score_normalization": "running", "kl_control": "adaptive",
    },
    "model, warm-up, demonstrations, in pieces": {
        "critic": "model", "generation_batch_size": 2, "whiten_advantages": "minibatch",
        "critic_warmup": 1, "weight_decay": 0.1, "ptx_batch_size": 3,
    },
    "grpo, uneven minibatches, groups resampled": {
        "advantage": "grpo", "samples_per_prompt": 2, "rollout_batch_size": 20, "reward": coarse,
        "minibatch_size": 10, "microbatch_size": 5, "resample_groups": 3,
    },
    "target_kl, KL in the loss, fewer rows than processes": {
        "lr": 1e-3, "target_kl": 0.002, "kl_in": "loss", "kl_estimator": "full",
        "rollout_batch_size": 4, "minibatch_size": 1, "microbatch_size": 1,
    },
    "all weights": {"finetune": "full", "critic": "adapter", "critic_warmup": 1},
}  # fmt: skip
ITERATIONS = 2
STEP = {"iterations": ITERATIONS, "lr": 1e-4}
ROUNDING = 1e-5
"""Largest difference that the order of sums makes in these iterations, relative to the norm."""


class Evaluations(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, _=0) -> None:
        self.found.append(outputs)


def trained(
    module: L.LightningModule, batches: list[Any], held_out: list[Any], replicas: Replicas = ONE,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:  # fmt: skip
    """The results of all steps and evaluations, and the weights after the last step."""
    module.replicas = replicas
    if isinstance(module, PPOModule):
        module.collector.replicas = replicas
    outputs, evaluations = Outputs(), Evaluations()
    fit(module, batches, [*callbacks, outputs, evaluations], held_out, every=len(batches))
    return {
        "steps": outputs.steps, "evaluations": evaluations.found, "weights": parameters(module),
        "kl_coef": getattr(module, "kl_coef", 0.0),
    }  # fmt: skip


def in_all(
    size: int, make: Callable[[], L.LightningModule], batches: list[Any], held_out: list[Any],
    folder: Path, *, shards: bool = False, callbacks: Sequence[Callback] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """What one process finds, and what each of `size` finds."""
    module: Any = make()

    def work(replicas: Replicas) -> dict[str, Any]:
        if shards:
            module.roles.shard(mesh(replicas.device))
            if module.roles.frozen is not None:
                module.roles.frozen.shard(mesh(replicas.device))
        return trained(module, batches, held_out, replicas, callbacks)

    found = replicated(size, work, folder)
    failed = [result for result in found if isinstance(result, Exception)]
    for error in sorted(failed, key=lambda error: isinstance(error, ProcessEndedError)):
        raise error
    return trained(module, batches, held_out, callbacks=callbacks), found


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal but for the order of sums; times may differ."""
    if isinstance(expected, Tensor) and expected.is_floating_point():
        assert found.shape == expected.shape, where
        off = (found.double() - expected.double()).norm()
        # The loss contains the policy's: a mean of terms of size 1, advantages, which cancel.
        least = 1.0 if where.endswith((".policy_loss", ".loss")) else 0.1
        assert off <= ROUNDING * max(float(expected.double().norm()), least), f"{where}: {off:g}"
    elif isinstance(expected, Tensor):
        assert found.tolist() == expected.tolist(), where
    elif isinstance(expected, Experience | Rollout):
        mask = expected.mask
        assert found.tokens[mask].tolist() == expected.tokens[mask].tolist(), where
        for field in fields(expected):
            if field.name != "tokens":
                assert_same(
                    getattr(found, field.name), getattr(expected, field.name),
                    f"{where}.{field.name}",
                )  # fmt: skip
    elif isinstance(expected, dict):
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif hasattr(expected, "__dataclass_fields__"):
        for name, value in vars(expected).items():
            if "seconds" not in name:
                assert_same(getattr(found, name), value, f"{where}.{name}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=ROUNDING, abs=1e-7), where
    else:
        assert found == expected, where


def assert_all_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The same in all processes, and as in one but for rounding."""
    whole = torch.cat([x.flatten() for x in expected["weights"].values()]).double()
    for result in found:
        assert_same(result, expected)
        weights = torch.cat([x.flatten() for x in result["weights"].values()]).double()
        assert (weights - whole).norm() <= ROUNDING * whole.norm()
        for name, tensor in found[0]["weights"].items():
            assert tensor.equal(result["weights"][name]), f"{name} differs between processes"


@pytest.mark.parametrize(("case", "size"), [("head", 3), *((case, 2) for case in [*CASES][1:-1])])
def test_ppo_in_several_processes(make_ppo: Make, case: str, size: int, tmp_path: Path) -> None:
    """All weights are those of test_sharding.py, beside a base that the processes share."""
    config = CASES[case]
    rows = config.get("rollout_batch_size", 8) // config.get("samples_per_prompt", 1)
    batches = [prompts(rows, seed=number) for number in range(ITERATIONS)]
    make = partial(with_ptx, make_ppo) if "ptx_batch_size" in config else make_ppo
    expected, found = in_all(size, lambda: make(**(STEP | config)), batches, [prompts(2)], tmp_path)
    assert_all_same(found, expected)
    lengths = torch.cat([step.experience.response_mask.sum(1) for step in expected["steps"]])
    assert lengths.max() == 6
    if case == "head":
        assert lengths.min() == 1
    if config.get("resample_groups"):
        assert all(step.replaced for step in expected["steps"])
    if config.get("target_kl"):
        assert any(len(step.updates) < 8 for step in expected["steps"])


@pytest.mark.parametrize(
    ("stage", "size"),
    matrix([("sft", 4), ("rm", 2), ("dpo", 2), ("kto", 2)], ("sft", 4), ("kto", 2)),
)
def test_supervised_stages_in_several_processes(stage: str, size: int, tmp_path: Path) -> None:
    build, make_batch, _ = STAGES[stage]
    batch, changes = make_batch(), {"margin_coef": 0.5} if stage == "rm" else {}
    short = batch.select(slice(0, 3))  # fewer rows than processes
    expected, found = in_all(
        size, lambda: build(**changes), [batch, short, batch], [batch, short], tmp_path
    )
    assert_all_same(found, expected)


def over_the_group(decoded: DecodedResponses) -> list[list[tuple[int, float]]]:
    """The length less the mean of those to the same prompt, half of it at the first token."""
    lengths, index = decoded.rollout.response_mask.sum(1).double(), decoded.rollout.index
    over = lengths - torch.stack([lengths[index == i].mean() for i in index])
    halves = zip((over / 2).tolist(), decoded.responses, strict=True)
    return [[(1, x), (len(text), x)] for x, text in halves]


def test_groups_are_compared_in_several_processes(make_ppo: Make, tmp_path: Path) -> None:
    """Three groups in two processes, one of which scores two of them, not half of the rows."""
    module = make_ppo(reward=over_the_group, advantage="grpo", rollout_batch_size=12,
                      minibatch_size=12, samples_per_prompt=4, max_response_tokens=6)  # fmt: skip

    def work(replicas: Replicas) -> Any:
        module.replicas = module.collector.replicas = replicas
        return module.make_experience(module.roll_out(prompts(3), module.generator(0, 0)))

    expected = work(ONE)
    assert len(expected.score.unique()) > 2
    assert torch.equal(expected.rewards[:, 0] == 0, expected.score == 0)
    for found in replicated(2, work, tmp_path):
        assert_same(found, expected)
    module.collector.config = replace(module.config, score_clip=3.0)
    with pytest.raises(RewardError, match=r"clipped at 3, .* for clip .* and for ppo\.score_clip"):
        work(ONE)


def test_an_error_in_one_process_is_raised_in_all(make_ppo: Make, tmp_path: Path) -> None:
    module = make_ppo()

    def work(replicas: Replicas) -> Any:
        module.replicas = module.collector.replicas = replicas
        if replicas.rank == 1:
            with torch.no_grad():
                module.roles.causal_lm.get_output_embeddings().weight.fill_(torch.nan)
        return module.make_experience(module.roll_out(prompts(8), module.generator(0, 0)))

    for error in replicated(2, work, tmp_path):
        assert isinstance(error, LogitsError)
        assert str(error).startswith("iteration 1: the model's logits are NaN")


def test_a_process_that_ends_ends_the_others(tmp_path: Path) -> None:
    def work(replicas: Replicas) -> Any:
        if replicas.rank == 1:
            raise ValueError
        return replicas.sum(torch.ones(3))

    found = replicated(3, work, tmp_path)
    assert [type(error) for error in found] == [ProcessEndedError, ValueError, ProcessEndedError]


def test_gradients_are_summed_in_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BUCKET", 5)
    shapes = [(2, 2), (3,), (7,), (1,), (2,), (1,)]

    def work(replicas: Replicas) -> Any:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for number, parameter in enumerate(parameters):
            # Each process lacks one that the other has, and none has the last one.
            if number not in (replicas.rank, 5):
                parameter.grad = torch.full_like(parameter, 10.0**replicas.rank + number)
        buckets = [[p.numel() for p in bucket] for bucket in collectives.buckets(parameters)]
        numbers = torch.tensor([replicas.rank + 0.5, torch.inf if replicas.rank else torch.nan])
        shares = replicas.sum_gradients(parameters, numbers)
        gradients = [None if p.grad is None else p.grad.unique().tolist() for p in parameters]
        return buckets, gradients, shares

    for buckets, sums, shares in replicated(2, work, tmp_path):
        assert buckets == [[4], [3], [7], [1, 2, 1]]
        assert sums == [[10.0], [2.0], [15.0], [17.0], [19.0], None]
        assert shares.tolist() == [[0.5, pytest.approx(torch.nan, nan_ok=True)], [1.5, torch.inf]]


def test_metrics_of_the_first_process_are_those_of_all(tmp_path: Path) -> None:
    class Logs(Callback):
        """Logs a metric that falls at the second step, in the first process alone."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            pl_module.log("kl_divergence", 3.0 - 2 * batch_idx)

    def work(replicas: Replicas) -> Any:
        found = []

        class Reads(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
                found.append(dict(trainer.callback_metrics))

        module = SFTModule(sft_roles("qwen3"), sft_config(), replicas)
        logging = [Logs()] if replicas.is_first else []
        batch = demonstrations()
        fit(module, [batch, batch], [*logging, SharedMetrics(replicas), Reads()])
        return [step["kl_divergence"] for step in found]

    assert replicated(2, work, tmp_path) == [[torch.tensor(3.0), torch.tensor(1.0)]] * 2


class Pruner(optuna.pruners.BasePruner):
    """A pruner that ends every trial at its first report."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return True


def test_a_trial_that_is_pruned_ends_in_all_processes(tmp_path: Path) -> None:
    """After the first of two evaluations, which the first process alone measures and reports."""
    file = str(tmp_path / "study.log")
    study = optuna.create_study(storage=open_storage(file), study_name="s", direction="minimize")
    number, batch = study.ask().number, demonstrations()

    class Measures(Callback):
        def on_validation_epoch_end(self, trainer, pl_module) -> None:
            pl_module.log("eval/loss", 1.0)

    def work(replicas: Replicas) -> int:
        trial = TrialReport(
            storage=file, study_name="s", number=number, metric="eval/loss", pruner=Pruner()
        )
        module = SFTModule(sft_roles("qwen3"), sft_config(), replicas)
        measures = [Measures()] if replicas.is_first else []
        callbacks = [*measures, SharedMetrics(replicas), trial]
        return batches_of(fit(module, [batch] * 4, callbacks, [batch], every=2))

    assert replicated(2, work, tmp_path) == [2, 2]
    (trial,) = study.trials
    assert trial.intermediate_values == {2: 1.0}
    assert trial.user_attrs == {PRUNED: 2}
