"""Base class of the modules of all stages, with their optimizer and its schedule."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from lightning_rlhf.core import errors, memory
from lightning_rlhf.core.config import StageConfig
from lightning_rlhf.models.roles import layer_matrices
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import Replicas

_OWN = L.pytorch.callbacks
REFUSED: Mapping[tuple[type, ...], str] = {
    (_OWN.GradientAccumulationScheduler, _OWN.BatchSizeFinder): "microbatch_size in the section of "
    "the stage splits a batch",
    (_OWN.StochasticWeightAveraging, _OWN.WeightAveraging): "ema_decay averages the weights of a "
    "run, and WeightAverage(decay) of lightning_rlhf.callbacks.stopping those in a Trainer of your "
    "own",
    (
        _OWN.ModelPruning,
        _OWN.BaseFinetuning,
        _OWN.LearningRateFinder,
    ): "lr, finetune and model.lora say how the weights are trained",
}
"""Callbacks of Lightning that do not fit manual optimization -> what to use instead."""
PRECISIONS = "32-true", "bf16-mixed"
"""Precisions of a Trainer: trained weights are in fp32, and gradients are not scaled."""


def refuse_object(one: Any, key: str, refused: Mapping[tuple[type, ...], str] = REFUSED) -> None:
    """Raise ConfigError where an object is of one of the refused classes; key: its place."""
    for classes, why in refused.items():
        if isinstance(one, classes):
            name = type(one).__name__
            raise errors.ConfigError(f"{key} is a {name}, which is not to be set: {why}")


def lr_factor(step: int, total_steps: int, config: StageConfig) -> float:
    """Return the learning rate of a step as a fraction of its peak: linear warm-up, then schedule.

    Steps count from 0. "linear" and "cosine" fall to 0 at total_steps, "constant" stays at 1.
    """
    warmup = config.warmup_fraction * total_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
    if config.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if config.lr_schedule == "linear" else 1.0


def seeded(*numbers: int) -> torch.Generator:
    """Return a new generator on the CPU, a pure function of the numbers."""
    sequence = np.random.SeedSequence(numbers)
    return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))


def check_parameters(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless names, shapes and types of the trained parameters are those of
    `checkpoint`."""
    stored, own = (
        {name: f"{[*x.shape]} of {x.dtype}" for name, x in state.items()}
        for state in (checkpoint["state_dict"], trainable_state(module))
    )
    if stored.keys() != own.keys():
        raise errors.CheckpointError(
            f"the checkpoint does not fit the model: it lacks {len(own.keys() - stored.keys())} of "
            f"the trained parameters and has {len(stored.keys() - own.keys())} others"
        )
    for name in own:
        if stored[name] != own[name]:
            raise errors.CheckpointError(
                f"the checkpoint does not fit the model: its {name} is {stored[name]}, the model's "
                f"{own[name]}"
            )


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters; others are in the checkpoints it started from."""
    return {name: x.detach() for name, x in module.named_parameters() if x.requires_grad}


def build_with(
    make: partial[Any], groups: list[dict[str, Any]], config: StageConfig,
    matrices: Collection[nn.Parameter],
) -> Optimizer:  # fmt: skip
    """Return the optimizer that `make` builds of groups of parameters, and of what the stage has.

    It is given betas = (0.9, adam_beta2) with eps = adam_eps, fused = True and `matrices`, where it
    takes arguments of these names and `make` does not hold them; no fused beside foreach=True.
    """
    takes = signature(make.func).parameters
    is_sharded = sharding.trains()  # fused=True does not take both kinds of parameters
    known = {"fused": not (make.keywords.get("foreach") or is_sharded), "matrices": matrices}
    if "betas" in takes:
        known |= {"betas": (0.9, config.adam_beta2), "eps": config.adam_eps}
    given = {name: value for name, value in known.items() if name in takes}
    found: Optimizer = make(groups, **given | make.keywords)
    return found


@contextmanager
def optimizer_faults() -> Iterator[None]:
    """Raise ConfigError naming the section where an optimizer raises an exception of its own."""
    try:
        yield
    except (errors.RLHFError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a class of the user's own may raise anything
        message = f"{errors.first_line(error)} ({type(error).__name__})"
        raise errors.ConfigError(f"optimizer: {message}") from error


class MuonAdamW(Optimizer):
    """Muon for some matrices and AdamW for all other parameters, as one optimizer.

    Each has its groups of parameters, in this order.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], *, matrices: Collection[nn.Parameter],
        betas: tuple[float, float], eps: float, fused: bool = True, **muon: Any,
    ) -> None:  # fmt: skip
        """Make both; betas, eps, fused: arguments of AdamW; muon: arguments of torch.optim.Muon."""
        groups, parts = list(params), list[Optimizer]()
        adamw = {"betas": betas, "eps": eps, "fused": fused}
        kinds: dict[type[Any], dict[str, Any]] = {Muon: muon, AdamW: adamw}
        for kind, arguments in kinds.items():
            own = []
            for group in groups:
                chosen = [p for p in group["params"] if (p in matrices) == (kind is Muon)]
                own += [{**group, "params": chosen}] if chosen else []
            parts += [kind(own, **arguments)] if own else []
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both with the groups and the state of this optimizer; return the loss
        that `closure` computes, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = iter(self.param_groups)  # which a schedule or a checkpoint may have replaced
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.step()
        return loss


class StageModule(L.LightningModule):
    """Base class of the modules of all stages: their optimizer steps and checkpoints.

    It finds a micro-batch size that fits into memory, and rejects updates that are not finite.
    """

    def __init__(
        self,
        stage: str,
        config: StageConfig,
        replicas: Replicas,
        microbatch: memory.MicrobatchSize | None = None,
    ) -> None:
        """Make the module before its first step.

        stage: name of the section that holds `config`.
        replicas: processes that divide the rows of each batch.
        microbatch: size of the micro-batches, shared with other models and halved for all at once;
            None makes one from `config.microbatch_rows`.
        """
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False
        self.stage = stage
        self.config = config
        self.replicas = replicas
        key = f"{stage}.microbatch_size"
        self.microbatch = microbatch or memory.MicrobatchSize(key, config.microbatch_rows)
        self.optimizer_class: partial[Any] = partial(AdamW)
        """Class of the optimizer with arguments; a run sets it to the section `optimizer`."""
        self.iteration = 0
        """Number of finished iterations or batches, over all resumes, with and without updates."""
        self.nonfinite = 0
        """Number of updates in a row whose loss or gradient was not finite."""
        self.weights_version = 0
        """Number of changes of the weights so far: optimizer steps, and swaps for their average."""
        self.logs_headline = self.logs_evaluation = True
        """False where a callback logs the headline metrics of training steps, or of validations,
        together with all others."""

    def configure_callbacks(self) -> list[L.Callback]:
        """Return no callback; raise ConfigError where the Trainer has one that does not fit.

        This is the first hook of a fit.
        """
        for name, allowed, shown in (
            ("precision", PRECISIONS, ", ".join(PRECISIONS)),
            ("accumulate_grad_batches", [1], f"1; the sizes of batches are keys of {self.stage}"),
            ("gradient_clip_val", [None], f"None; {self.stage}.max_grad_norm clips the gradient"),
            ("overfit_batches", [0], "0, as a run trains and evaluates on all of its data"),
        ):
            found = getattr(self.trainer, name)
            errors.require(found in allowed, f"{name} of the Trainer", found, shown)
        for one in self.trainer.callbacks:  # type: ignore[attr-defined]
            refuse_object(one, "a callback of the Trainer")
        return []

    def on_fit_start(self) -> None:
        """Raise ConfigError unless the Trainer has one epoch, and the processes of `replicas`."""
        trainer, size = self.trainer, self.replicas.size
        once = "1: the data of a whole run are one epoch, however often it repeats examples"
        errors.require(
            trainer.max_epochs == 1, "max_epochs of the Trainer", trainer.max_epochs, once
        )
        given = f"{size}, that of the module's argument `replicas`"
        found = trainer.world_size
        errors.require(found == size, "the number of the Trainer's processes", found, given)

    def add_gradient(self, loss: Tensor) -> Tensor:
        """Add the gradient of a 0-d loss to that of the trained parameters; return it detached.

        The losses of micro-batches are divided by the denominator of their minibatch, so that their
        gradients add up to that of the minibatch.
        """
        # The casts of the forward pass are recorded; autocast would round gradients kept in fp32.
        with torch.autocast(self.device.type, enabled=False), sharding.uninterrupted():
            self.manual_backward(loss)
        return loss.detach()

    def sum_and_clip(self, numbers: Float[Tensor, " n"]) -> tuple[Float[Tensor, "size n"], Tensor]:
        """Sum the gradient over all processes, and clip it to a norm of `max_grad_norm`.

        Returns: the numbers of each process, in their order, and the norm before clipping, 0-d.
        """
        optimizer: Any = self.optimizers()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        return sharding.sum_and_clip(trained, self.config.max_grad_norm, numbers, self.replicas)

    def weights_changed(self, *_: Any) -> None:
        """Count a change of the trained weights; the optimizer calls it after each step."""
        self.weights_version += 1

    def build_optimizer(
        self, groups: Sequence[tuple[float, Iterable[nn.Parameter]]], total_steps: int
    ) -> dict[str, Any]:
        """Return the optimizer and its schedule, as Lightning takes them.

        groups: pairs of a learning-rate factor and its parameters. Vectors (biases, norms) get no
            weight decay.
        total_steps: number of calls of the scheduler over the whole run.
        """
        config, parameter_groups = self.config, []
        for factor, parameters in groups:
            trained = [p for p in parameters if p.requires_grad]
            for decay, matrices in ((config.weight_decay, True), (0.0, False)):
                group = {"lr": config.lr * factor, "weight_decay": decay}
                if chosen := [p for p in trained if (p.ndim > 1) == matrices]:
                    parameter_groups.append({"params": chosen, **group})
        with optimizer_faults():
            optimizer = self.make_optimizer(parameter_groups)
        optimizer.register_step_post_hook(self.weights_changed)
        optimizer.register_state_dict_post_hook(lambda _, state: sharding.whole_tensors(state))
        optimizer.register_load_state_dict_pre_hook(sharding.sharded_state)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(step, total_steps, config)
        )
        # Lightning's LearningRateMonitor reads the interval; the modules step the scheduler.
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return `optimizer_class` on groups of parameters with learning rate and weight decay.

        A subclass returns another optimizer here; `build_optimizer` adds the schedule.
        """
        return build_with(self.optimizer_class, groups, self.config, layer_matrices(self))

    def check_finite(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return whether the loss and the gradient norm of an update, 0-d, are finite.

        Counts updates in a row that are not, and warns at the first of them.

        Raises: NotFiniteError at the last of `max_nonfinite` updates in a row that are not.
        """
        if (loss + grad_norm).isfinite():
            self.nonfinite = 0
            return True
        self.nonfinite += 1
        stage, allowed, made = self.stage, self.config.max_nonfinite, self.global_step
        if self.nonfinite == allowed:
            self.nonfinite = 0  # for a run that resumes here
            raise errors.NotFiniteError(
                stage, in_a_row=allowed, loss=float(loss), grad_norm=float(grad_norm), made=made
            )
        if self.nonfinite == 1:
            # The number of updates made keeps texts different: Python shows each text once.
            warnings.warn(
                f"an update was not made, after {made} that were: its loss is "
                f"{loss:g} and the norm of its gradient {grad_norm:g}; update/nonfinite counts "
                f"them, {stage}.max_nonfinite={allowed} in a row end the run",
                stacklevel=2,
            )
        return False

    def log_headline(self, metrics: Mapping[str, Tensor], count: int | None = None) -> None:
        """Log metrics of a step with Lightning, at this iteration, unless a callback does.

        count: number of what they are means over in a batch of a validation, whose mean is logged;
            None in training.
        """
        if self.logs_headline if count is None else self.logs_evaluation:
            self.log_dict(dict(metrics), prog_bar=True, batch_size=count)
            # The step that Lightning's loggers use.
            self.log("step", float(self.iteration), batch_size=count)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = sharding.whole_tensors(trainable_state(self))
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if sharding.trains():
            sharding.arrive()  # weights that are gathered are copies
        own = dict(self.named_parameters())
        parts = {name: sharding.part_of(x, own.get(name)) for name, x in state_dict.items()}
        return super().load_state_dict(parts, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {"nonfinite": self.nonfinite, "weights_version": self.weights_version}
        learner = {"microbatch_size": self.microbatch.rows, **kept}
        checkpoint.update(iteration=self.iteration, learner=learner)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_parameters(self, checkpoint)
        self.iteration, learner = checkpoint["iteration"], checkpoint["learner"]
        self.microbatch.rows, self.nonfinite = learner["microbatch_size"], learner["nonfinite"]
        self.weights_version = learner["weights_version"]
