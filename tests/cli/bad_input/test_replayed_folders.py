"""lightning-rlhf replay of a run folder that is damaged: one error that names the file, and
nothing is removed or changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from lightning_rlhf.data.last_batch import LastBatch, last_batch_of, write_last_batch
from lightning_rlhf.data.lengths import DemonstrationTokens, PreferenceTokens

from ..conftest import Workplace, given, tree
from .damages import BYTES, JSON, Edit, column, facts, remove, saved, sets, table

RECORD = "rollouts/000003.parquet"


def first(value: Any) -> Any:
    """The first entry of a column is another one."""
    return lambda values: [value, *values[1:]]


def in_list(value: Any) -> Any:
    """The first number of the first list is another one."""
    return lambda values: [[value, *values[0][1:]], *values[1:]]


def longer(values: list[Any]) -> list[Any]:
    return [[*values[0], values[0][0]], *values[1:]]


SECTIONS = ("stage", "ppo", "model", "data", "reward", "trainer", "policy", "run", "job", "seed",
            "outputs", "resume", "overwrite", "record", "debug")  # fmt: skip
CONFIG: Mapping[str, Edit] = {
    **BYTES, **JSON, "missing": remove,
    **{f"{key} is a list": sets(**{key: [1, {}]}) for key in SECTIONS},
    **{f"{key} is a number": sets(**{key: -1.5}) for key in SECTIONS},
    **{f"{key} is gone": sets(**{key: ...}) for key in SECTIONS},
    **{f"{key} is an interpolation": sets(**{key: "${none}"}) for key in SECTIONS
       if key != "outputs"},  # it is read as text, and a folder may have that name
    "an unknown key": sets(what=1), "half an interpolation": sets(run="${"),
}  # fmt: skip
COLUMNS = ("index", "prompt", "response", "prompt_tokens", "response_tokens", "padding_tokens",
           "logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns", "score",
           "parts", "ended")  # fmt: skip
FACT_KEYS = ("iteration", "kl_coef", "prompt_width", "response_width", "shuffle", "updates",
             "parameters", "machine")  # fmt: skip
RECORDED: Mapping[str, Edit] = {
    **BYTES,
    **{f"{name} is gone": table(lambda t, name=name: t.drop([name])) for name in COLUMNS},
    **{f"{name} is text": column(name, lambda x: ["x"] * len(x), pa.string()) for name in COLUMNS
       if name not in ("prompt", "response")},
    **{f"{name} is null": column(name, lambda x: [None] * len(x)) for name in COLUMNS},
    **{f"fact {key} is gone": facts(**{key: ...}) for key in FACT_KEYS},
    **{f"fact {key} is a list": facts(**{key: [1]}) for key in FACT_KEYS},
    **{f"fact {key} is text": facts(**{key: "x"}) for key in FACT_KEYS if key != "parameters"},
    **{f"fact {key} is huge": facts(**{key: 10**12}) for key in FACT_KEYS if key != "kl_coef"},
    "negative width": facts(prompt_width=-1), "width 0": facts(response_width=0),
    "another iteration": facts(iteration=2), "short shuffle": facts(shuffle="eJwDAAAAAAE="),
    "token id of no model": column("response_tokens", in_list(10**6)),
    "token id of no model in a prompt": column("prompt_tokens", in_list(10**6)),
    "negative token id": column("response_tokens", in_list(-1)),
    "token id behind 64 bits": column("response_tokens", in_list(2**62)),
    "a token more": column("response_tokens", longer), "a number more": column("kl", longer),
    "an empty response": column("response_tokens", first([])),
    "a row less": table(lambda t: t.slice(1)), "no rows": table(lambda t: t.slice(0, 0)),
    "other parts": column("parts", lambda x: [{"other": 1.0}] * len(x),
                          pa.struct([("other", pa.float32())])),
    "two parts": column("parts", lambda x: [{"head": 1.0, "b": 1.0}] * len(x),
                        pa.struct([("head", pa.float32()), ("b", pa.float32())])),
}  # fmt: skip
CHECKPOINT: Mapping[str, Edit] = {
    **BYTES,
    **{f"without {key}": saved(key, to=...) for key in (
        "state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers", "iteration",
        "learner", "moments", "kl_coef", "lightning_rlhf")},
    "text as the learner": saved("learner", to="x"),
    "text as kl_coef": saved("kl_coef", to="x"),
}  # fmt: skip
PPO: Mapping[str, Mapping[str, Edit]] = {
    "config.json": CONFIG,
    "parents.json": {**BYTES, **JSON, "a number": sets(sft=5)},
    "run_id.txt": {**BYTES, "missing": remove},
    RECORD: RECORDED,
    "checkpoints/000002.ckpt": CHECKPOINT,
    "rollouts": {"file": lambda path: (remove(path), path.touch())},
    "replay_3.html": {"folder": lambda path: (path.mkdir(), (path / "a").touch())},
}  # fmt: skip
LAST: Mapping[str, Edit] = {
    **BYTES, "missing": remove,
    **{f"fact {key} is gone": facts(**{key: ...}) for key in ("stage", "step", "source", "unit",
                                                              "machine")},
    **{f"fact {key} is a list": facts(**{key: [1]}) for key in ("stage", "step", "source", "unit",
                                                                "machine")},
    "another stage": facts(stage="ppo"), "step 0": facts(step=0), "step 99": facts(step=99),
    "negative token id": column("prompt_tokens", in_list(-1)),
    "token id of no model": column("prompt_tokens", in_list(10**6)),
    "token id behind 32 bits": column("prompt_tokens", in_list(2**40)),
    "null as a number": column("number", first(None)),
    "text as numbers": column("number", lambda x: ["x"] * len(x), pa.string()),
    "no numbers": table(lambda t: t.drop(["number"])),
    "no tokens": table(lambda t: t.drop(["prompt_tokens"])),
    "null as tokens": column("prompt_tokens", first(None)),
    "text as tokens": column("prompt_tokens", lambda x: [["x"]] * len(x), pa.list_(pa.string())),
    "no rows": table(lambda t: t.slice(0, 0)),
    "text as a loss": column("loss", lambda x: ["x"] * len(x), pa.string()),
    "null as a loss": column("loss", first(None)),
}  # fmt: skip
OF_STAGE: Mapping[str, Mapping[str, Edit]] = {
    "sft": {"no response": column("response_tokens", first([])),
            "null as a response": column("response_tokens", first(None))},
    "rm": {"no chosen response": column("chosen_tokens", first([])),
           "null as a margin": column("margin", first(None)),
           "no margin": table(lambda t: t.drop(["margin"]))},
}  # fmt: skip
GOES_ON = {"parents.json": ("lone surrogate",), "config.json": ()}
"""Damages with which the iteration is replayed all the same."""
OTHERS = ("cannot be replayed", "is not recorded")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, pipeline: Workplace) -> Workplace:
    """The pipeline's workplace with run=recorded, and a batch that broke sft and rm off."""
    place = Workplace(tmp_path_factory.mktemp("recorded") / "work")
    shutil.copytree(pipeline.folder, place.folder, symlinks=True)
    command = ("stage=ppo", "run=recorded", "record=true", "ppo.checkpoint_every=2")
    place.mini(*command, "ppo.val_every=3", *given(place)).succeeded  # noqa: B018
    losses = {"loss": torch.tensor([1.0, 2.0]), "grad_norm": torch.tensor([1.0, 1.0])}
    common: Any = {"step": 6, "source": "x", "unit": "line", "numbers": [1, 2], "machine": {}}
    scores = {"chosen_score": torch.zeros(2), "rejected_score": torch.zeros(2)}
    for batch in (
        LastBatch(stage="sft", **common, facts=losses,
                  examples=[DemonstrationTokens([5, 6], [7, 8]), DemonstrationTokens([5], [7])]),
        LastBatch(stage="rm", **common, facts=losses | scores,
                  examples=[PreferenceTokens([5], [7], [8], 0.0)] * 2),
    ):  # fmt: skip
        write_last_batch(last_batch_of(place.stage(batch.stage)), batch, str)
    return place


@pytest.fixture
def place(tmp_path: Path, recorded: Workplace) -> Workplace:
    """A copy of it."""
    shutil.copytree(recorded.folder, tmp_path / "work")
    config = tmp_path / "work/outputs/recorded/mini/ppo/config.json"
    text = config.read_text().replace(str(recorded.folder), str(tmp_path / "work"))
    config.write_text(text)
    return Workplace(tmp_path / "work")


def check(place: Workplace, run: Path, file: str, edit: Edit) -> None:
    edit(run / file)
    before = tree(place.folder)
    error = place.call("replay", str(run)).error
    assert file.split("/")[-1] in error or any(text in error for text in OTHERS), error
    assert tree(place.folder) == before


CASES = [
    (file, name, edit)
    for file, edits in PPO.items()
    for name, edit in edits.items()
    if file not in GOES_ON or name not in GOES_ON[file]
]


@pytest.mark.parametrize(
    ("file", "edit"), [pytest.param(file, edit, id=f"{file}-{n}") for file, n, edit in CASES]
)
def test_an_iteration_of_ppo(place: Workplace, file: str, edit: Edit) -> None:
    check(place, place.stage("ppo", "recorded"), file, edit)


@pytest.mark.parametrize(
    ("stage", "edit"),
    [
        pytest.param(stage, edit, id=f"{stage}-{name}")
        for stage, own in OF_STAGE.items()
        for name, edit in {**LAST, **own}.items()
    ],
)
def test_a_batch_that_broke_the_run_off(place: Workplace, stage: str, edit: Edit) -> None:
    check(place, place.stage(stage), "last_batch.parquet", edit)


def test_the_batches_can_be_replayed(recorded: Workplace) -> None:
    """So that what is refused above is refused for its damage."""
    for stage in OF_STAGE:
        outcome = recorded.call("replay", str(recorded.stage(stage)))
        assert "step 6 was not made" in outcome.out
        assert "Traceback" not in outcome.err
