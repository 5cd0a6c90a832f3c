"""Values and keys that mean nothing, and what cannot be composed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from ..conftest import MODULE, TRAIN_PY, Workplace
from .conftest import Refusals

pytestmark = pytest.mark.usefixtures("no_model")

SFT = ("stage=sft",)
RM = ("stage=rm", "policy.checkpoint=base")
PPO = ("stage=ppo", "policy.checkpoint=base", "reward=random")
EVAL = ("stage=eval_reward", "policy.checkpoint=base", "reward=random")
FUNCTION = (*PPO[:2], "reward=function", "reward.path=lightning_rlhf.rewards.functions:length_band")
HTTP = (*PPO[:2], "reward=http", "reward.url=http://127.0.0.1:9/score")
MODEL = (*PPO[:2], "reward=model", "reward.name_or_path=org/name")
WANDB = ("stage=sft", "logger=wandb")
DIGITS = int("9" * 30)

VALUES: list[tuple[tuple[str, ...], str, Any, list[str]]] = [
    (SFT, "seed", 2**32, ["seed is 4294967296", "<= 4294967295"]),
    (SFT, "seed", None, ["seed is None"]),
    (SFT, "sft.lr", math.nan, ["sft.lr is nan", "> 0"]),
    (SFT, "sft.lr", math.inf, ["sft.lr is inf", "> 0"]),
    (SFT, "sft.lr", True, ["sft.lr is True", "a number"]),
    (SFT, "sft.lr", [1e-4], ["sft.lr is [0.0001]", "a number"]),
    (SFT, "sft.batch_size", 2.0, ["sft.batch_size is 2.0", "a whole number"]),
    (SFT, "sft.batch_size", DIGITS, ["sft.batch_size is 9999", "<= 1000000"]),
    (SFT, "sft.batch_size", 2**53, ["sft.batch_size is 9007199254740992", "<= 1000000"]),
    (SFT, "sft.val_every", DIGITS, ["sft.val_every is 9999", f"<= {2**53}"]),
    (SFT, "sft.epochs", 1e30, ["sft.epochs is 1e+30", "<= 1000000"]),
    (SFT, "sft.epochs", 1e300, ["sft.epochs is 1e+300", "<= 1000000"]),
    (SFT, "sft.epochs", 1e-300, ["sft.epochs is 1e-300", ">= 0.03125", "1 of the 32 examples"]),
    (RM, "rm.epochs", 1e-8, ["rm.epochs is 1e-08", ">= 0.03125", "1 of the 32 examples"]),
    (SFT, "sft.lr_schedule", {"a": 1}, ["sft.lr_schedule is {'a': 1}", "cosine"]),
    (SFT, "sft", 5, ["sft is 5", "a mapping"]),
    (SFT, "policy", None, ["policy is None", "a mapping"]),
    (SFT, "outputs", "a" * 5000, ["outputs is 'aaa", "(5000 characters)"]),
    (SFT, "run", "", ["run is ''", "a folder name"]),
    (SFT, "run", ".", ["run is '.'", "a folder name"]),
    (
        SFT,
        "job",
        math.nan,
        ["job is nan; allowed: text; quote what reads as no text: \"job='NAME'\""],
    ),
    (SFT, "run", 1.5, ["run is 1.5; allowed: text; quote"]),
    (SFT, "run", "a\\b", [r"run is 'a\\b'", "slashes"]),
    (SFT, "run", "a\nb", [r"run is 'a\nb'", "line breaks"]),
    (SFT, "run", "a" * 256, ["run is 'aaa", "255 bytes"]),
    (SFT, "recipe", 5, ["recipe=5", "leave stage= out"]),
    (SFT, "wandb.api_key", "k", ["wandb is not a known key"]),
    # the model
    (SFT, "model.name", "", ["model.name is ''"]),
    (SFT, "model.revision", 5, ["model.revision is 5", "text, or null"]),
    (SFT, "model.tokenizer", ["a"], ["model.tokenizer is ['a']", "text, or null"]),
    (SFT, "model.attn_implementation", 5, ["model.attn_implementation is 5"]),
    (SFT, "model.dtype", ["a"], ["model.dtype is ['a']", "float32, bfloat16"]),
    (SFT, "model.from_config", None, ["exactly one of model.name_or_path"]),
    (SFT, "model.lora.target_modules", 5, ["model.lora.target_modules is 5", "all-linear"]),
    (SFT, "model.lora.target_modules", [1], ["model.lora.target_modules is [1]"]),
    # the data
    (SFT, "data.val_fraction", 0, ["data.val_fraction is 0", "< 1"]),
    (SFT, "data.demonstrations", None, ["data.demonstrations is None", "a mapping"]),
    (SFT, "data.demonstrations.test", "x", ["data.demonstrations.test is not a known key"]),
    (SFT, "data.chat_template_kwargs.tokenize", 5, ["chat_template_kwargs is 'tokenize'"]),
    (SFT, "data.chat_template_kwargs.messages", 5, ["chat_template_kwargs is 'messages'"]),
    (SFT, "data.chat_template_kwargs.tools", 5, ["the chat template", "{'tools': 5}"]),
    # the trainer and the loggers
    (SFT, "trainer.threads", DIGITS, ["trainer.threads is 999", "<= 1024"]),
    (SFT, "trainer.accelerator", {"a": 1}, ["trainer.accelerator is {'a': 1}", "cpu, gpu"]),
    (SFT, "logger.kind", ["csv"], ["logger.kind is ['csv']", "tensorboard"]),
    (SFT, "logger.project", "x", ["logger.project is not a known key", "allowed: kind"]),
    (WANDB, "logger.project", 5, ["logger.project is 5"]),
    (WANDB, "logger.entity", [1], ["logger.entity is [1]"]),
    (WANDB, "logger.tags", [{"a": 1}], ["logger.tags is {'a': 1}", "texts"]),
    (WANDB, "logger.mode", ["x"], ["logger.mode is ['x']", "offline"]),
    # the stages
    (RM, "rm.heads", 2**53, ["rm.heads is 9007199254740992", "<= 1000000"]),
    (RM, "rm.calibration_samples", 2**53, ["rm.calibration_samples is", "<= 1000000"]),
    (EVAL, "eval_reward.samples", 2**53, ["eval_reward.samples is 9007199254740992", "<= 1000000"]),
    (PPO, "ppo.rollout_batch_size", 2**53, ["ppo.rollout_batch_size is", "<= 1000000"]),
    (PPO, "ppo.val_samples_per_prompt", 2**53, ["ppo.val_samples_per_prompt", "<= 1000000"]),
    (EVAL, "eval_reward.samples", "all", ["eval_reward.samples is 'all'", "a whole number"]),
    (PPO, "ppo.advantage", ["gae"], ["ppo.advantage is ['gae']", "grpo"]),
    (PPO, "ppo.kl_in", "loss", ["ppo.kl_estimator is 'k1'", "ppo.kl_in=loss"]),
    # the reward
    (PPO, "reward.kind", {"a": 1}, ["reward.kind is {'a': 1}", "function, head, http"]),
    (PPO, "reward.weight", math.nan, ["reward.weight is nan"]),
    (FUNCTION, "reward.path", 5, ["reward.path is 5", "path/to/file.py:name"]),
    (FUNCTION, "reward.path", "os:system", ["function system takes (command)"]),
    (MODEL, "reward.name_or_path", "data", ["reward.name_or_path=data", "config.json"]),
    (MODEL, "reward.tokenizer", 5, ["reward.tokenizer is 5"]),
    (MODEL, "reward.device", "cuda:99", ["reward.device is 'cuda:99'", "null, cpu"]),
]


@pytest.mark.parametrize(("command", "key", "value", "named"), VALUES, ids=range(len(VALUES)))
def test_a_value_is_named(
    refused: Refusals, command: tuple[str, ...], key: str, value: Any, named: list[str]
) -> None:
    error = refused.value(key, value, *command, named=named)
    assert "s3cret" not in error


def test_components_of_a_reward(refused: Refusals) -> None:
    for components, named in (
        (5, "reward.components is 5"),
        ({"a-b": {}}, "there is no component 'a-b' in reward.components"),
        ({"a-b": {"kind": "http", "weight": 1}}, "a name in reward.components is 'a-b'"),
        ({"a": 5}, "reward.components.a is 5"),
        ({"a": {"kind": ["x"], "weight": 1}}, "reward.components.a.kind is ['x']"),
        ({"a": {"kind": "sum", "weight": 1}}, "reward.components.a.kind is 'sum'"),
    ):
        given = OmegaConf.create({"kind": "sum", "components": components})
        refused.value("reward", given, *PPO, named=[named])


COMMANDS: list[tuple[list[str], list[str]]] = [
    (["stage=sft", "model=hub"], ["model.name=... model.name_or_path=..."]),
    (["stage=sft", "model=hub", "model.name=x"], ["model.name_or_path must be given"]),
    (["stage=ppo", "reward=http", "policy.checkpoint=base"], ["reward.url must be given"]),
    (["stage=sft", "model=5"], ["model=5 is no choice; allowed: model=NAME, one name of a file"]),
    (["stage=sft", "~model"], ["~model is no choice; allowed: model=NAME, one name of a file"]),
    (["stage=sft", "model=[tiny,mini]"], ["model=[tiny,mini] is no choice", "one name"]),
    (["stage=sft", "++data=5"], ["++data=5"]),
    (["stage=ppo", "pp.kl_coef=1"], ["pp is not a known key; did you mean ppo?"]),
    (["stage=sft", "run.x=1"], ["run.x is not a known key; did you mean run?"]),
    (
        ["stage=ppo", "zebra=1"],
        ["zebra is not a known key; allowed: callbacks, data, debug, dpo, eval_policy"],
    ),
    (["stage=sft", "lr=1"], ["lr is not a known key; did you mean sft.lr?"]),
    (["stage=sft", "++lr=1"], ["lr is not a known key; did you mean sft.lr?"]),
    (["lr=1"], ["did you mean sft.lr or rm.lr or ppo.lr or dpo.lr?"]),
    (["stage=sft", "batch_size=1"], ["did you mean sft.batch_size?"]),
    (["stage=ppo", "batch_size=1"], ["did you mean ppo.rollout_batch_size or ppo.gen"]),
    (["stage=ppo", "ppo.patience=1"], ["did you mean ppo.stop.patience?"]),
    (["stage=grpo"], ["stage is 'grpo'; allowed: sft, rm", "stage=ppo advantage=grpo"]),
    (["stage=sft", "trainer.thread=1"], ["did you mean trainer.threads?"]),
    (["stage=sft", "model.lora.alpa=1"], ["did you mean model.lora.alpha?"]),
    (["stage=sft", "model.from_config.hiden_size=8"], ["model.from_config.hiden_size"]),
    (["stage", "sft"], ["stage is no override", "KEY=VALUE"]),
    (["stage=sft", "sft.lr=1,e-3"], ["sft.lr=1,e-3 has a comma", "KEY=[A,B]", "-m"]),
    (["stage=sft", "run='x"], ["run='x is no override", "KEY=VALUE"]),
    (["stage=sft", "seed=" + "9" * 5000], ["5000 digits"]),
    (["stage=sft", "run=${nosuch}"], ["run has no value", "nosuch"]),
    (["stage=ppo", "ppo.stop_strings={a:1}"], ["ppo.stop_strings={a:1}", "Cannot merge"]),
    (["stage=sft", "~seed"], ["seed is 'missing'"]),
    (["stage=sft", "~debug"], ["debug is 'missing'"]),
    (["stage=sft", "~sft"], ["sft is 'missing'"]),
    (["stage=sft", "~sft.lr"], ["sft.lr is missing"]),
    (["recipe=../x"], ["recipe=../x is not known", "quickstart"]),
    (["recipe=5"], ["recipe=5 is not known", "quickstart"]),
    (["stage=../stage/sft"], ["stage is '../stage/sft'; allowed: sft, rm, ppo, dpo, rank, eval"]),
    (["stage=sft.yaml"], ["stage is 'sft.yaml'; allowed: sft, rm"]),
    (["stage=sft", "model=./tiny"], ["model=./tiny is not known", "tiny"]),
    (["stage=sft", "data=../data/small"], ["data=../data/small is not known", "small"]),
    (["stage=ppo", "reward=/head"], ["reward=/head is not known", "composite"]),
    (["stage=sft", "trainer=./cpu"], ["trainer=./cpu is not known", "cpu, gpu"]),
    (["stage=sft", "logger=../logger/csv"], ["logger=../logger/csv is not known", "wandb"]),
    (["stage=ppo", "advantage=./gae"], ["advantage=./gae is not known", "rloo"]),
    (["recipe=quickstart", "model=./tiny"], ["model=./tiny is not known", "tiny"]),
    (["recipe=quickstart", "job='a/b'"], ["job is 'a/b'; allowed: a folder name"]),
    (["recipe=quickstart", "job=${nosuch}"], ["job has no value", "nosuch"]),
    (["config=my.yaml"], ["config is not a known key"]),
    (["--config-name", "my"], ["--config-name my: no folder", "--config-dir FOLDER"]),
    (["-cn", "a/my.yaml", "stage=sft"], ["--config-name a/my.yaml: no folder"]),
]


@pytest.mark.parametrize(("command", "named"), COMMANDS, ids=range(len(COMMANDS)))
def test_what_cannot_be_composed(refused: Refusals, command: list[str], named: list[str]) -> None:
    refused(*command, named=named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def (", ["j.py fails", "SyntaxError"]),
        ("import sys; sys.exit(3)", ["j.py fails", "SystemExit(3)"]),
        ("1 / 0", ["j.py fails", "ZeroDivisionError"]),
        ("x = 1", ["has no function 'f'"]),
        ("f = 1", ["has no function 'f'", "f is 1"]),
        (b"x = '\xff'\n", ["j.py fails", "SyntaxError"]),
        (None, ["there is no file"]),
    ],
)
def test_a_judge_that_is_broken(
    refused: Refusals, text: str | bytes | None, named: list[str]
) -> None:
    file = refused.folder / "j.py"
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    refused.value("data.judge", "j.py:f", *PPO, named=["data.judge is 'j.py:f'", *named])


@pytest.mark.parametrize("outputs", ["taken", "taken/below", "link"])
def test_a_file_where_outputs_should_be(refused: Refusals, outputs: str) -> None:
    """Whoever runs the tests may be root, who may write into every folder: so a file."""
    (refused.folder / "taken").write_text("a file")
    (refused.folder / "link").symlink_to("nowhere")
    refused.value("outputs", outputs, *SFT, named=[f"outputs={outputs}: ", "is not a folder"])


def test_a_file_where_the_run_should_be(refused: Refusals) -> None:
    file = refused.folder / "outputs" / "default" / "mini"
    file.parent.mkdir(parents=True)
    file.write_text("a file")
    refused.value("run", "default", *SFT, named=["outputs=outputs: ", "mini is not a folder"])


def test_a_traceback_is_for_who_asks(refused: Refusals) -> None:
    for wrong in ("seed=-1", "sed=1"):
        outcome = refused.place.mini("stage=sft", wrong, "debug=true")
        assert outcome.status == 1
        assert "Traceback" in outcome.err


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        (TRAIN_PY, ["stage=sft", "model=nosuch"], "error: model=nosuch is not known"),
        (MODULE, ["stage=ppo", "nosuch"], "error: nosuch is no override"),
    ],
)
def test_as_a_shell_sees_it(
    workplace: Workplace, command: list[str], arguments: list[str], named: str
) -> None:
    outcome = workplace.process(command, *arguments)
    assert outcome.err.startswith(named)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.error
    assert not workplace.outputs.exists()


@pytest.mark.parametrize("key", ["run", "job", "model.name"])
@pytest.mark.parametrize(
    "name",
    ["a\x9b", "a\u2028b", "a\u2029", "\u202ea", "a\u202e", "a\x00", "a\nb", "a\x1b[31m", "a\x7f",
     "a.", "a ", "a\ud800", "a\u200b", "a\xa0", ".a", " a", "-a", "a\\b", "", "\u2028"],
)  # fmt: skip
def test_a_name_of_a_folder_can_be_read(refused: Refusals, key: str, name: str) -> None:
    refused.value(key, name, *SFT, named=[f"{key} is "])


@pytest.mark.parametrize(
    "name", ["a'b", 'a"b', "kl_coef=0.02,seed=1", "é 漢", "a.b", "1", "x+y[z]{"]
)
def test_other_names_of_folders_are_taken(workplace: Workplace, name: str) -> None:
    """By a recipe too, which hands its job to the commands of its stages."""
    quoted = name.replace("'", r"\'")
    missing = "data.demonstrations.train=none.jsonl"
    for word in ("stage=sft", "recipe=quickstart"):
        error = workplace.mini(word, f"job='{quoted}'", f"run='{quoted}'", missing).error
        assert error == "data.demonstrations.train: data file none.jsonl does not exist"
