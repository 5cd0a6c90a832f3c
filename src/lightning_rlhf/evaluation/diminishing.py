"""The point of diminishing returns of a run: files in its folder, one line on the console."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
from numpy import ndarray

from lightning_rlhf.callbacks.evaluation import SAMPLES
from lightning_rlhf.core.errors import CheckpointError, counted
from lightning_rlhf.core.metrics import GOLD, HELD_OUT, REWARD
from lightning_rlhf.io.console import print_line
from lightning_rlhf.io.storage import json_lines, read_text, written_whole
from lightning_rlhf.io.user_code import nearest_path
from lightning_rlhf.report.diminishing import (
    FEWEST_POINTS,
    GoldStop,
    draw_diminishing,
    find_gold_stop,
    measure_returns,
)
from lightning_rlhf.report.figures import DPI, STYLE
from lightning_rlhf.runs.folders import METRICS, check_kinds
from lightning_rlhf.runs.measured import by_prompt, damage_named, read_metrics

NUMBERS, PICTURE = "diminishing.json", "diminishing.png"


def paired_stop(folder: Path) -> GoldStop | None:
    """Return where to stop by the gold scores of the evaluations; None where they are not known.

    Evaluations of other prompts than those of the last one are left out.
    Raises CheckpointError where a file of samples is damaged.
    """
    gold: dict[int, ndarray] = {}
    reward: dict[int, ndarray] = {}
    prompts: list[int] | None = None
    for path in sorted((folder / SAMPLES).glob("eval_*.jsonl"), reverse=True):
        samples = [sample for _, sample in json_lines(path)]
        with damage_named(path):
            found = [sample["index"] for sample in samples]
            prompts = prompts or found
            if found == prompts:
                step = int(path.stem.removeprefix("eval_"))
                gold[step], reward[step] = (by_prompt(samples, name) for name in (GOLD, HELD_OUT))
    return find_gold_stop(gold, reward)


def print_diminishing(folder: Path, title: str) -> bool:
    """Write diminishing.json and diminishing.png into a run's folder, and print the conclusion.

    Return False, with nothing written or printed, where the run has fewer than FEWEST_POINTS
    iterations.

    title: name of the run.
    Raises CheckpointError where the folder or its metrics.csv is damaged.
    """
    check_kinds(folder)
    curves = read_metrics(folder)
    if len(curves.get(REWARD, ((), ()))[0]) < FEWEST_POINTS:
        return False
    found = measure_returns(curves, paired_stop(folder))
    with written_whole(folder / NUMBERS) as beside:
        text = json.dumps(found.as_json(), indent=1, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
    with written_whole(folder / PICTURE) as beside, mpl.rc_context(STYLE):
        draw_diminishing(found, title).savefig(beside, dpi=DPI, format="png")
    print_line(f"diminishing returns: {found.sentence} ({folder / PICTURE})")
    return True


def repeat_conclusion(folder: Path) -> None:
    """Print the conclusion that a run left in diminishing.json, if it left one.

    Raises CheckpointError where the file is damaged.
    """
    if (file := folder / NUMBERS).is_file():
        with damage_named(file):
            sentence = json.loads(read_text(file))["sentence"]
        print_line(f"diminishing returns: {sentence} ({folder / PICTURE})")


def again(folder: Path) -> None:
    """Do the same for a finished run. Raises CheckpointError where it has too few iterations."""
    allowed = "allowed: a run of stage=ppo, as outputs/<run>/<model>/ppo"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist{nearest_path(str(folder))}; {allowed}")
    if not print_diminishing(folder, "/".join(folder.resolve().parts[-4:])):
        count = len(read_metrics(folder).get(REWARD, ((), ()))[0])
        raise CheckpointError(
            f"{folder / METRICS} has {counted(count, 'iteration')} of stage=ppo; {allowed}, with "
            f"{FEWEST_POINTS} or more"
        )
