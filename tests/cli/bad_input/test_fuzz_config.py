"""Whatever is set to whatever: settings, or one error that names what is wrong."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.io.console import is_hidden
from lightning_rlhf.stages.folder.changes import flatten
from lightning_rlhf.stages.settings import read_settings
from lightning_rlhf.stages.stage import Settings

from .conftest import Refusals, composed

COMMANDS = [
    ("stage=sft", "logger=wandb"),
    ("stage=rm",),
    ("stage=ppo",),
    ("stage=ppo", "reward=model", "reward.name_or_path=a/b"),
    ("stage=ppo", "reward=http", "reward.url=http://localhost"),
    ("stage=ppo", "reward=function", "reward.path=a.py:b"),
    ("stage=ppo", "reward=composite"),
    ("stage=eval_reward",),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**63, 10**40, 0.5, 1e-300, 1e300])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", " ", "a/b", "..", "~x", "a" * 300, "\x00", "\ud800", "${seed}", "???"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=2)
    ),
    max_leaves=4,
)


@cache
def base(command: tuple[str, ...]) -> tuple[DictConfig, list[str]]:
    """What the command composes, and every key of it, of leaves and of what holds them."""
    cfg = composed(*command).copy()
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    leaves = flatten(OmegaConf.to_container(cfg, resolve=False))
    parents = {key.rpartition(".")[0] for key in leaves} - {""}
    return cfg, sorted({*leaves, *parents})


@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_of_any_key(data: st.DataObject) -> None:
    whole, keys = base(data.draw(st.sampled_from(COMMANDS)))
    key = data.draw(st.sampled_from([*keys, "x", "model.x", "sft.x.y"]))
    value = data.draw(VALUES)
    cfg = whole.copy()
    try:
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    except Exception:  # no value of a configuration: Hydra could not have made it
        return
    try:
        found = read_settings(cfg)
    except RLHFError:
        return
    assert isinstance(found, Settings)


WORDS = st.sampled_from(
    [
        "seed", "run", "sft.lr", "sft.batch_size", "model", "data", "stage", "model.lora.r",
        "trainer.threads", "reward", "logger", "~seed", "+x", "++sft.y", "model.from_config.z",
        "data.demonstrations.train", "reward@x", "hydra.x", "", "a b", "policy.checkpoint",
        "job", "outputs", "config", "advantage", "stage_model", "hydra.sweep.dir", "resume",
        "logger.project", "sft.stop", "++data", "~model", "model.name", "\x1b[31m",
    ]
)  # fmt: skip
GIVEN = st.text(max_size=6) | st.sampled_from(
    ["1", "-1", "[1", "{a:1}", "'x", "${x}", "${oc.env:X}", "a=b", "1,2", "null", "???", "nan",
     "../sft", "./x", "a'b", "\u202e", "\x9b2J", "a\\", "[red]", "${", "choice(1,2)", "~", "1e999"]
)  # fmt: skip


def test_any_override(refused: Refusals) -> None:
    """Through Hydra, a quarter of a second each; what is right would go on to the data."""
    (refused.folder / "data" / "sft_train.jsonl").unlink()
    place = refused.place

    @settings(derandomize=True, max_examples=60, deadline=None)
    @given(word=WORDS, value=GIVEN)
    def search(word: str, value: str) -> None:
        outcome = place.mini("stage=sft", f"{word}={value}")
        assert outcome.error
        assert len(outcome.err) < 700
        assert not any(map(is_hidden, outcome.err.removesuffix("\n")))

    search()
    assert not place.outputs.exists()
