"""The step that becomes `final/`: the keys that decide it, and the check that it has learned."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import lightning as L
import torch

from lightning_rlhf.callbacks import checkpoints, files
from lightning_rlhf.callbacks.compute import PREFIX as COMPUTE
from lightning_rlhf.callbacks.progress import metric_text, position
from lightning_rlhf.callbacks.stopping import AVERAGE
from lightning_rlhf.core import errors, ppo_config
from lightning_rlhf.core.config import Mode, StageConfig
from lightning_rlhf.core.metrics import EVAL_PART, JUDGE, Goal
from lightning_rlhf.core.metrics import METRICS as DEFINITIONS
from lightning_rlhf.io import console, storage
from lightning_rlhf.modules.optim import StageModule, check_parameters, trainable_state
from lightning_rlhf.parallel.sharding import local_part
from lightning_rlhf.runs.folders import ENDING, METRICS, Ending, Export, Value, read_ending
from lightning_rlhf.runs.resume import origin
from lightning_rlhf.runs.stage import Settings


def goal_of(settings: Settings, section: str = "best") -> Goal:
    """Return the metrics that decide which evaluation is the best: of `best`, or the stage's.

    section: best, or stop for the metric that has to gain, which is by default the same.
    Empty where none is named. Raises ConfigError as `metric_of`.
    """
    named = settings.config.stop if section == "stop" else settings.config.best
    if named.metric is not None:
        return (metric_of(settings, f"{settings.stage}.{section}", named.metric, named.mode),)
    return goal_of(settings) if section == "stop" else settings.definition.goal


def metric_of(settings: Settings, key: str, name: str, mode: Mode | None) -> tuple[str, Mode]:
    """Return a metric of the stage's evaluations with its direction, by default the defined one.

    key: section of the configuration that names both.

    Raises ConfigError where the stage measures no such metric, or its direction is not known.
    """
    stage = settings.definition
    has_judge = stage.reads_judge and settings.data.judge is not None
    # The components of a reward that is a sum have metrics of their own.
    parts = [EVAL_PART + part for part in settings.reward] if len(settings.reward) > 1 else []
    known: dict[str, Mode | None] = {}
    for pattern, found in DEFINITIONS.items():
        is_asked = has_judge or not pattern.startswith(JUDGE)
        if stage.name in found.stages and pattern.startswith("eval/") and is_asked:
            names = parts if pattern.startswith(EVAL_PART) else [pattern]
            known |= dict.fromkeys(names, found.better)
    is_open = not known and name.startswith("eval/")  # a stage with metrics of its own
    known |= dict(stage.goal)
    pattern = next((x for x in known if "<" in x and name.startswith(x.partition("<")[0])), name)
    # A constant is of no use; a component's direction is the user's to say.
    offered = [name for name, better in known.items() if better or name in parts]
    errors.require(pattern in known or is_open, f"{key}.metric", name, ", ".join(offered))
    direction = mode or known.get(pattern)
    if direction is None:
        raise errors.ConfigError(f"{key}.mode is None; allowed for {name}: min, max")
    return name, direction


def check_final(settings: Settings, steps: int | None) -> None:
    """Raise ConfigError where `final`, `best` or `stop` do not fit the stage or one another.

    steps: number of steps of the run; None where only its data decide, and any step may be named.
    """
    config: StageConfig = settings.config
    stage, step, stop = settings.stage, config.final, config.stop
    for section, is_wanted, found in (
        ("best", step == "best", f"{stage}.final is 'best'"),
        ("stop", stop.patience is not None, f"{stage}.stop.patience is {stop.patience}"),
    ):
        if not goal_of(settings, section) and is_wanted:
            raise errors.ConfigError(
                f"{found}, and stage={stage} names no metric of its evaluations (Stage.goal); "
                f"allowed with a metric in {stage}.{section}.metric"
            )
    if not isinstance(step, int):
        return
    if stop.patience is not None or (
        isinstance(stop, ppo_config.PPOStopConfig) and stop.max_kl is not None
    ):
        allowed = "allowed where a rule may end the run: last, best"
        raise errors.ConfigError(f"{stage}.final is {step}; {allowed}")
    if steps is not None:
        every = config.validation_interval(steps)
        is_evaluated = step <= steps and (step % every == 0 or step == steps)
        evaluated = f"a multiple of {every} up to {steps}, or {steps}"
        allowed = f"last, best, or a step at which the run evaluates: {evaluated}"
        errors.require(is_evaluated, f"{stage}.final", step, allowed)


def choose(
    folder: Path,
    saver: checkpoints.Checkpoints,
    module: L.LightningModule,
    steps: int,
    last: int,
    reason: str | None,
) -> dict[str, float] | None:
    """Give `module` the weights of the step that becomes `final/`; process 0 writes ending.json.

    folder: folder of the run. steps: number of steps of its schedule. last: its last step.
    reason: why a rule of `stop` ended it there; None where none did.

    Returns the metrics of the evaluation of that step; None where it is the last one, whose metrics
    the Trainer has.
    """
    final = saver.config.final
    step = {"last": last, "best": saver.best_step}[final] if isinstance(final, str) else final
    assert step is not None  # the last step is evaluated
    stopped = None if last == steps else reason or "a callback"
    if stopped is not None and saver.replicas.is_first:
        by, why = ("callback", "") if reason is None else ("rule", f": {reason}")
        console.print_line(f"a {by} ended the run after step {last} of {steps}{why}")
    allowed = f"last, best, since the run was ended after step {last}"
    errors.require(step <= last, f"{saver.origin.stage}.final", step, allowed)
    ending = ending_of(folder, saver.goal, str(final), step, last, stopped)
    if step != last:
        path = files.path_of(saver.folder, step)
        if step == saver.best_step and not path.is_file():
            path = saver.folder / files.BEST
        load_weights(module, path, saver.origin)
    if not saver.replicas.is_first:
        return None
    if step != last:
        found = ", ".join(
            f"{name} {metric_text(value.chosen)} (last {metric_text(value.last)} at step {last}, "
            f"{'higher' if value.mode == 'max' else 'lower'} is better)"
            for name, value in ending.metrics.items()
            if value.chosen is not None and value.last is not None
        )
        console.print_line(f"final/ is step {step} (final={final}): {found}")
    with storage.written_whole(folder / ENDING) as temporary:
        temporary.write_text(json.dumps(asdict(ending), indent=2) + "\n")
    return None if step == last else measured_at(folder, step)


def export_of(folder: Path, settings: Settings, checkpoint: Path, step: int, out: Path) -> Export:
    """Return the export of a step of the run in `folder` to the folder `out`.

    The metrics include those before the first step, as in `final/`.
    """
    ending, found = read_ending(folder), measured_at(folder, step)
    last = max(step, *(int(path.stem) for path in files.numbered(checkpoint.parent)))
    last, stopped = (last, None) if ending is None else (ending.last_step, ending.stopped)
    if found:
        found = measured_before(folder) | found
    # A run of another version may be exported: its weights have the names of this one's, or not.
    version = files.read_stamp(checkpoint)["version"]
    return Export(
        folder=out,
        checkpoint=checkpoint,
        origin=replace(origin(settings), version=version),
        metrics=found | measured_at(folder, step, COMPUTE),
        ending=ending_of(folder, goal_of(settings), str(step), step, last, stopped),
    )


def load_weights(
    module: torch.nn.Module, path: Path, origin: files.Origin, prefix: str | None = None
) -> None:
    """Load the trained parameters of a checkpoint into the module, averaged where it has averages.

    prefix: beginning of the names of the module's parameters in the checkpoint of a larger module,
        of which nothing else is read; None where `module` is the whole one.

    Raises CheckpointError where the file is damaged, of another run, or does not fit.
    """
    content = files.check_checkpoint(path, origin)
    state = content["state_dict"] | content.get(AVERAGE, {})
    if prefix is not None:
        names = [name for name in trainable_state(module) if prefix + name in state]
        state = {name: state[prefix + name] for name in names}
    try:
        check_parameters(module, {"state_dict": state})
    except errors.CheckpointError as error:
        raise errors.CheckpointError(f"{path}: {error}") from error
    spoiled = [name for name, x in state.items() if not torch.isfinite(x).all()]
    if spoiled:
        raise errors.CheckpointError(
            f"{path} holds numbers that are NaN or infinite, in {spoiled[0]}"
        )
    module.load_state_dict(state, strict=False)
    if isinstance(module, StageModule):
        module.weights_changed()


def measured_at(folder: Path, step: int, prefix: str = "eval/") -> dict[str, float]:
    """Return the metrics after `step` whose names have the prefix; {} where there are none."""
    cells = files.read_rows(folder / METRICS).get(step, {})
    return {name: x for name, x in cells.items() if name.startswith(prefix)}


def measured_before(folder: Path) -> dict[str, float]:
    """Return the metrics of the evaluation before the first step, each as start/NAME."""
    return {f"start/{name}": x for name, x in measured_at(folder, 0).items()}


def ending_of(
    folder: Path, goal: Goal, final: str, step: int, last: int, stopped: str | None
) -> Ending:
    """Return the end of a run, with the `goal` metrics at the chosen step and at the last one."""
    metrics, rows = {}, files.read_rows(folder / METRICS)
    for name, mode in goal:
        found = (rows.get(number, {}).get(name) for number in (step, last))
        chosen, end = (x if x is not None and math.isfinite(x) else None for x in found)
        metrics[name] = Value(mode=mode, chosen=chosen, last=end)
    return Ending(final=final, step=step, last_step=last, metrics=metrics, stopped=stopped)


def check_learned(stage: str, folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise TrainingError where no update was made, DivergedError where weights are not finite."""
    if made := trainer.global_step:
        trained = [(n, local_part(p)) for n, p in module.named_parameters() if p.requires_grad]
        if bad := [name for name, parameter in trained if not parameter.isfinite().all()]:
            reason = f"{stage} has diverged: after step {position(trainer, module)}, {len(bad)} of "
            reason += f"{len(trained)} trained parameters are NaN or infinite (the first: {bad[0]})"
            raise errors.DivergedError(f"{reason}. {checkpoints.divergence_advice(stage, made)}")
        return
    rows, found = files.read_rows(folder / METRICS).values(), []
    remedy = checkpoints.divergence_advice(stage, 0)
    for metric, key in (("nonfinite", ""), ("skipped", "max_ratio"), ("stopped", "target_kl")):
        counts = [row.get(f"update/{metric}", 0.0) for row in rows]
        if refused := int(sum(filter(math.isfinite, counts))):
            found.append(f"{refused} with a loss or gradient that is not finite")
            if key:
                found[-1] = f"{refused} above ppo.{key}"
                remedy = f"A larger ppo.{key}, or null, lets updates through"
    raise errors.TrainingError(
        f"{stage} has learned nothing, and writes no final/: none of its updates was made "
        f"({', '.join(found)}). {remedy}"
    )
