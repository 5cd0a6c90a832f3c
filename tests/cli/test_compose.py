"""Everything that conf/ offers composes, is accepted, and is read by some line."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig

import lightning_rlhf
from lightning_rlhf.callbacks.files import LoggerConfig, WandbConfig
from lightning_rlhf.cli.arguments import refuse_other_stages
from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.core.config import EvalConfig, PolicyEvalConfig, RMConfig, SFTConfig
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.config import DataConfig, Split
from lightning_rlhf.data.formats import Kind, formats_of
from lightning_rlhf.models.config import LoRASettings, ModelConfig
from lightning_rlhf.runs import console
from lightning_rlhf.runs.folders import changes
from lightning_rlhf.runs.settings import REWARDS, read_settings
from lightning_rlhf.runs.stage import SUM, PolicySource, Settings, TrainerConfig, find_stage

CONF = console.CONF
SOURCE = Path(lightning_rlhf.__file__).parent


MUST_BE_GIVEN = {
    "function": ["reward.path=rules.py:score"],
    "http": ["reward.url=http://localhost:8000/score"],
    "judge": [
        "reward.arguments.url=http://h/v1",
        "reward.arguments.model=m",
        "reward.arguments.rubric=short",
    ],
    "model": ["reward.name_or_path=org/name"],
    "regular_expression": ["reward.arguments.pattern=x"],
    SUM: ["+reward@reward.components.a=head", "+reward@reward.components.b=random"],
}


VERIFIERS = [
    "exact_match", "json_schema", "judge", "math_answer", "numeric_answer", "reasoning_gym",
    "regular_expression", "unit_tests",
]  # fmt: skip
KINDS = {"composite": SUM, **dict.fromkeys(VERIFIERS, "function")}
"""Presets that are examples of a kind, by another name."""


def given(reward: str) -> list[str]:
    """A reward, with what its preset leaves to the user."""
    return [f"reward={reward}", *MUST_BE_GIVEN.get(reward, [])]


def options(group: str) -> list[str]:
    """The presets of a group of conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


STAGES, MODELS = options("stages"), options("model")
FORMS = [
    name
    for name in options("data")
    if {"defaults", "format"} <= {*OmegaConf.load(CONF / "data" / f"{name}.yaml")}
]
"""Presets that name a form of data and its sources, and have all else from data=files."""
DATA = [name for name in options("data") if name not in FORMS]
HUB = ["model.name=other", "model.name_or_path=someone/model"]
"""What model=hub and model=small ask for."""


@pytest.fixture(scope="module", autouse=True)
def _composer() -> Iterator[None]:
    """Hydra on conf/, with what the command registers."""
    register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides))


def model_overrides(model: str) -> list[str]:
    return [f"model={model}", *(HUB if model in ("hub", "small") else [])]


def yaml(group: str, option: str) -> dict[str, Any]:
    """One file of conf/ as it is written, interpolations included."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    return {key: value for key, value in tree.items() if key != "defaults"}


def stage_keys(stage: str) -> dict[str, Any]:
    """Of the stage's section, as it is where nothing is overridden."""
    return yaml("stages", stage) | (yaml("advantage", "gae") if stage == "ppo" else {})


@pytest.mark.parametrize("turn", range(len(options("reward"))))
def test_every_model_composes_with_all_else(turn: int) -> None:
    """The stages and the options of the other groups are assigned in turn."""
    dealt = {"stages": STAGES, "data": DATA} | {
        group: options(group) for group in ("reward", "trainer", "logger")
    }
    assert max(map(len, (*dealt.values(), MODELS))) <= len(options("reward"))
    stage, data, reward, trainer, logger = (each[turn % len(each)] for each in dealt.values())
    model = MODELS[turn % len(MODELS)]
    cfg = composed(f"stage={stage}", *model_overrides(model), f"data={data}",
                   *given(reward), f"trainer={trainer}", f"logger={logger}")  # fmt: skip
    settings = read_settings(cfg)
    assert settings.stage == stage
    assert set(settings.tree) & set(STAGES) == {stage}  # no section of another is written down
    assert settings.model.name == ("other" if model in ("hub", "small") else model)
    assert settings.tree["reward"]["kind"] == KINDS.get(reward, reward)
    assert settings.trainer.accelerator == trainer or trainer == "auto"
    assert settings.logger.kind == logger
    assert isinstance(settings.data.demonstrations, Split)
    assert (settings.data.judge is not None) == (data in ("course", "quickstart"))


@pytest.mark.parametrize("data", ["quickstart", "hh"])
def test_a_local_file_is_not_validated_on_a_data_set_of_the_hub(data: str) -> None:
    """Of each kind, unless the data set is given."""
    kinds = ("demonstrations", "preferences", "prompts")
    own = [f"data.{kind}.train=mine.jsonl" for kind in kinds]
    both = [*own, *(f"data.{kind}.val=org/name:test" for kind in kinds)]
    preset, mine, given_too = (
        read_settings(composed("stage=sft", f"data={data}", *w)).data for w in ([], own, both)
    )
    for kind in kinds:
        shipped = getattr(preset, kind).val
        is_local = shipped is not None and shipped.endswith((".jsonl", ".jsonl.gz"))
        assert getattr(mine, kind) == Split(train="mine.jsonl", val=shipped if is_local else None)
        assert getattr(given_too, kind) == Split(train="mine.jsonl", val="org/name:test")


@pytest.mark.parametrize("data", FORMS)
def test_every_form_of_data_composes_and_names_what_it_holds(data: str) -> None:
    settings = read_settings(composed("stage=sft", f"data={data}"))
    assert settings.data.format == data
    for field in dataclasses.fields(DataConfig)[:3]:
        split, kind = getattr(settings.data, field.name), cast(Kind, field.name)
        assert split.train is None or formats_of(settings.data.format, kind), kind


@pytest.mark.parametrize("option", [x for x in options("stage_model") if "trainer" not in x])
def test_a_model_s_own_numbers_apply_to_it_alone(option: str) -> None:
    stage, model = next((s, option.removeprefix(f"{s}_")) for s in STAGES if s in option)
    own = yaml("stage_model", option)
    assert any(stage_keys(stage)[key] != value for key, value in own.items())
    for name, expected in ((model, stage_keys(stage) | own), ("hub", stage_keys(stage))):
        cfg = composed(f"stage={stage}", *model_overrides(name))
        assert OmegaConf.to_container(cfg[stage]) == expected


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo"])
def test_the_memory_plan_chooses_micro_batches_but_of_tiny(stage: str) -> None:
    """The floating-point sums of the default do not depend on the memory of the machine."""
    sizes = [read_settings(composed(f"stage={stage}", f"model={model}")).config.microbatch_size
             for model in ("smollm2_135m", "tiny")]  # fmt: skip
    assert sizes == ["auto", 32 if stage == "ppo" else 16]


def test_tiny_runs_on_one_thread_unless_set_otherwise() -> None:
    """Other numbers of threads round differently."""
    found = [
        read_settings(composed("stage=sft", *words)).trainer.threads
        for words in (["trainer=cpu"], ["trainer=gpu"], ["trainer.threads=2"], ["model=qwen0.8b"])
    ]
    assert found == [1, 1, 2, None]


def test_weights_dtype_of_the_trainer_reaches_hub_models_alone() -> None:
    def dtype(*overrides: str) -> str:
        return read_settings(composed("stage=sft", *overrides)).model.dtype

    assert dtype("model=qwen0.8b", "trainer=gpu") == "bfloat16"
    assert dtype("model=qwen0.8b", "trainer=cpu") == "float32"
    assert dtype("model=tiny", "trainer=gpu") == "float32"


# Every field is read; that it is a key, and a key a field, is checked by each composition.


def test_every_advantage_sets_the_same_keys_and_no_other_file_does() -> None:
    """Else choosing one would leave a number of another behind. Others may be changed besides."""
    keys = {option: set(yaml("advantage", option)) for option in options("advantage")}
    assert all(found - set(yaml("stages", "ppo")) == keys["gae"] for found in keys.values()), keys
    assert not keys["gae"] & set(yaml("stages", "ppo"))
    for option in options("stage_model"):
        assert not keys["gae"] & set(yaml("stage_model", option))


@pytest.mark.parametrize("option", options("policy_loss"))
def test_a_loss_by_the_name_of_its_paper(option: str) -> None:
    """It comes after the advantage and before the user, and no number of a model replaces it."""
    own = yaml("policy_loss", option)
    assert set(own) <= {*yaml("stages", "ppo"), "loss_reduction"}
    assert not any(set(own) & set(yaml("stage_model", one)) for one in options("stage_model"))
    words = ["stage=ppo", "advantage=dr_grpo", f"policy_loss={option}", "ppo.sapo_tau_neg=9"]
    found = read_settings(composed(*words)).config
    assert {key: getattr(found, key) for key in own} | {"sapo_tau_neg": 9} == own | {
        "sapo_tau_neg": 9
    }
    assert (found.advantage, found.sapo_tau_neg) == ("dr_grpo", 9)


def test_every_key_of_a_model_s_configuration_is_known_to_transformers() -> None:
    """transformers takes any key in silence."""
    for option in options("model"):
        from_config = yaml("model", option).get("from_config")
        if from_config:
            keys = dict(from_config)
            plain = AutoConfig.for_model(keys.pop("model_type"))
            assert {key for key in keys if not hasattr(plain, key)} == set(), option


CONFIGS = (
    *(SFTConfig, RMConfig, PPOConfig, EvalConfig, PolicyEvalConfig, *REWARDS.values()),
    *(ModelConfig, LoRASettings, DataConfig, Split, LoggerConfig, WandbConfig),
    *(TrainerConfig, PolicySource, Settings),
)
RECEIVERS = re.compile(
    r"\b(?:_?config|component|term|model|data|settings|trainer|self|policy|split|sources|cfg)"
    r"(?=\.(\w+))"
)
"""What a section is called where it is read: `settings.trainer.devices`."""


def test_every_field_is_read() -> None:
    """By a line of Python; the dtype of weights by another value of conf/."""
    read = {name for file in SOURCE.rglob("*.py") for name in RECEIVERS.findall(file.read_text())}
    fields = {field.name for cls in CONFIGS for field in dataclasses.fields(cls)}
    assert fields - read == {"weights_dtype"}
    assert "${trainer.weights_dtype}" in (CONF / "model/hub.yaml").read_text()


@pytest.mark.parametrize(("stage", "model", "lora", "full"), [
    ("ppo", "qwen0.8b", 1e-5, 3e-6), ("dpo", "qwen0.8b", 2e-5, 6e-6),
    ("ppo", "tiny", 1e-3, 3e-4), ("dpo", "tiny", 1e-3, 3e-4),
])  # fmt: skip
def test_all_weights_have_a_learning_rate_of_their_own(
    stage: str, model: str, lora: float, full: float
) -> None:
    words = [f"stage={stage}", f"model={model}"]
    for more, expected in {
        (): lora, (f"{stage}.finetune=full",): full,
        (f"{stage}.finetune=full", f"{stage}.lr=1"): 1,
    }.items():  # fmt: skip
        assert read_settings(composed(*words, *more)).config.lr == expected


# What is not known is refused.


@pytest.mark.parametrize(
    ("override", "stage"),
    [
        ("sft.lr=1", "sft"), ("++sft.x.y=1", "sft"), ("~rm.lr", "rm"), ("advantage=rloo", "ppo"),
        ("policy_loss=gspo", "ppo"),        ("stage_model@ppo=ppo_tiny", "ppo"), ("seed=1", None),
        ("+reward@reward.components.ppo=head", None),
    ],
)  # fmt: skip
def test_what_only_another_stage_reads_is_refused(override: str, stage: str | None) -> None:
    if stage is not None:
        key = override.lstrip("+~").split("=")[0].removeprefix("stage_model@")
        with pytest.raises(ConfigError) as raised:
            refuse_other_stages("dpo", ["stage=dpo", "dpo.lr=1", override], STAGES)
        assert f"leave out {override}, or give it to stage={stage}" in str(raised.value)
        assert key.partition(".")[0] in str(raised.value)
    refuse_other_stages(stage or "dpo", ["stage=sft", override, "seed=1"], STAGES)


def test_a_value_that_only_another_stage_lacks_is_not_missed() -> None:
    cfg = composed("stage=sft", "ppo.kl_coef=???", "rm.lr=${nosuch}")
    assert read_settings(cfg).stage == "sft"


# Two configurations that differ.


def test_what_decides_or_caches_makes_no_other_run(tmp_path: Path) -> None:
    part = {"kind": "head", "weight": 1.0, "arguments": {"cache": "a"}}
    then = {"stage": "ppo", "reward": {"kind": "sum", "components": {"a": part, "unfit": part}}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(then))
    now = json.loads(file.read_text())
    for component in now["reward"]["components"].values():
        component |= {"unfit": "warn", "arguments": {"cache": "b"}}
    assert changes(find_stage(now["stage"]), now, file) == []
    now["reward"]["components"]["unfit"]["weight"] = 2.0
    assert changes(find_stage(now["stage"]), now, file) == [
        "reward.components.unfit.weight was 1.0, is 2.0"
    ]
