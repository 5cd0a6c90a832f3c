"""A reward model that would read other text than it was trained on is found out before PPO."""

import json
import shutil
from pathlib import Path

import pytest

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.evaluation import evaluate_reward
from lightning_rlhf.runs.console import RECIPES

from .conftest import SHIPPED, Workplace, tree
from .others import TEMPLATE, classifier_scores, save_classifier, until_called

TOKENIZER = RECIPES / "quickstart" / "tokenizer"


def stopped(place: Workplace, *command: str) -> list[str]:
    """The lines that it says at its end, and the error without the first of them, which it repeats.

    It leaves nothing else; no training has begun.
    """
    before = tree(place.outputs)
    outcome = place.mini(*command, "debug=true")
    assert outcome.status == 1, outcome.out
    assert tree(place.outputs) == before
    assert not (place.outputs / "stopped").exists()
    said = outcome.out.splitlines()
    (start,) = (i for i, line in enumerate(said) if "held-out pairs read through" in line)
    error = outcome.err.splitlines()[-1].removeprefix("error: ")  # behind the traceback
    assert error.startswith(f"{said[start]}. ")
    return [*said[start:], error.removeprefix(f"{said[start]}. ")]


def test_a_fault_in_the_format_stops_ppo_or_is_reported(judged: Workplace, tmp_path: Path) -> None:
    """Here a space in the place of each line's end."""
    start = f"policy.checkpoint={judged.stage('sft') / 'final'}"
    model, here = tmp_path / "changed", " [assistant]"
    shutil.copytree(judged.outputs / "other" / "other" / "rm" / "final", model)
    assert (model / "chat_template.jinja").read_text() == TEMPLATE
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("\\n", " "))
    words = ("stage=ppo", "reward=model", start, f"reward.name_or_path={model}")
    first, there_line, here_line, difference, last = stopped(judged, *words, "run=stopped")
    assert first.startswith("reward model: 4 held-out pairs read through PPO's path, ")
    assert float(first.partition("differ by ")[2].split()[0]) > 0.05
    prompt = json.loads((judged.folder / "data" / "preferences_val.jsonl").open().readline())
    said = repr(f"[start][user]{prompt['prompt']}\n[assistant]{prompt['chosen']}[end]")
    assert there_line == f"  text of a pair there: {said}"
    assert here_line.startswith("  text of a pair here:  ")
    assert here in here_line
    assert difference.startswith("  first difference: at character ")
    assert "reward.format_check=warn" in last
    out = until_called(judged, *words, "run=warned", "reward.format_check=warn", "debug=true")
    assert difference in out


def test_a_classifier_of_which_the_text_alone_and_the_pairs_of_the_data_tell(
    judged: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A doubled start stops PPO, and so does one that prefers what people do not: a label of its
    other output does that."""
    folder = save_classifier(tmp_path / "classifier")
    command = [
        *("stage=ppo", "ppo.iterations=1", "reward=model", "reward.max_tokens=256"),
        *(f"policy.checkpoint={judged.stage('sft') / 'final'}", f"reward.name_or_path={folder}"),
    ]
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    lines = stopped(judged, *command, "run=stopped")
    assert lines[1].startswith("  text of a pair: '[start][start][user]")
    assert lines[2:] == [
        "  it starts with '[start]' twice",
        "Fix the text; or reward.format_check=warn continues",
    ]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rows = [json.loads(line) for line in (SHIPPED / "preferences_val.jsonl").open()][:8]
    for row in rows:
        sides = [{**row, "response": row[side]} for side in ("chosen", "rejected")]
        low, high = classifier_scores(folder, sides)
        if low > high:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command.append(f"data.preferences.val={file}")
    lines = stopped(judged, *command, "run=stopped")
    assert lines[2].startswith("  it ranks 0 pairs as labelled and 8 the other way round")
    out = until_called(judged, *command, "run=penalty", "reward.weight=-1", "debug=true")
    assert "held-out pairs read through" in out
    assert "the other way round" not in out

    def torn(*_: object) -> None:
        raise DataError("torn")

    monkeypatch.setattr(evaluate_reward, "fitting_pairs", torn)  # not the reading of the pairs
    assert judged.mini(*command, "run=torn").error == "torn"


def test_a_head_that_is_spoken_to_in_another_way(workplace: Workplace) -> None:
    """Its template is the policy's own, but is given another argument."""
    shutil.copytree(TOKENIZER, workplace.folder / "tokenizer")
    file = workplace.folder / "tokenizer" / "chat_template.jinja"
    file.write_text(file.read_text().replace("'<|assistant|>'", "'<|assistant|>' + (mood or '')"))
    mood = "+data.chat_template_kwargs.mood={}".format
    tokenizer = "model.tokenizer=tokenizer"
    for stage in ("sft", "rm"):
        words = [f"stage={stage}", f"{stage}.epochs=0.125", tokenizer, mood("calm")]
        workplace.mini(*words).succeeded  # noqa: B018
    lines = stopped(workplace, "stage=ppo", tokenizer, mood("wild wild"))
    assert lines[1].partition("<|assistant|>")[2].startswith("calm")
    assert lines[2].partition("<|assistant|>")[2].startswith("wild wild")
    assert "reward.format_check=warn" in lines[-1]
