"""Words of a command: what is an option, what an override, and whose section it sets."""

from __future__ import annotations

import pytest

from lightning_rlhf.cli.arguments import (
    COMMANDS,
    WITHOUT_RUN,
    options_last,
    parse_arguments,
    parse_overrides,
    stage_of,
)
from lightning_rlhf.core.errors import ConfigError

from .conftest import Workplace


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        ("stage=ppo --cfg job seed=1", "stage=ppo seed=1 --cfg job"),
        ("--config-dir runs/lr=0.1 stage=sft -m seed=1,2", "stage=sft seed=1,2 "
         "--config-dir runs/lr=0.1 -m"),
        ("-cd own stage=sft -cn my", "stage=sft -cd own -cn my"),
        ("--config-d own stage=sft", "stage=sft --config-d own"),
        ("stage=ppo --info reward=http", "stage=ppo reward=http --info"),
        ("-i defaults stage=ppo", "stage=ppo -i defaults"),
        ("-p ppo stage=ppo -c job ~seed", "stage=ppo ~seed -p ppo -c job"),
        ("-sc query=bash", "query=bash -sc"),
    ],
)  # fmt: skip
def test_overrides_go_before_options(words: str, ordered: str) -> None:
    """As Hydra's parser takes them; it refuses overrides on both sides of an option."""
    given = parse_arguments(words.split())
    assert options_last(words.split(), given) == ordered.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nothing"], "--nothing is no option; allowed: KEY=VALUE without -"),
        (["--cfg", "jab"], "argument --cfg/-c: invalid choice: 'jab'"),
        (["stage=sft", "--config-dir"], "argument --config-dir/-cd: expected one argument"),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arguments(words)
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(("word", "command"), [("chek", "check"), ("dashbord", "dashboard")])
def test_a_mistyped_command(workplace: Workplace, word: str, command: str) -> None:
    told = f"{word} is no command; did you mean {command}?"
    assert workplace.call(word, "stage=ppo").error == told


def test_a_word_that_is_like_no_command_is_told_all_of_them(workplace: Workplace) -> None:
    for words in (["frobnicate"], ["frobnicate", "outputs/x"], ["frobnicate", "stage=ppo"]):
        told = workplace.call(*words).error
        assert [name for name in [*COMMANDS, *WITHOUT_RUN] if name not in told] == []
    assert "serve-reward" not in workplace.call("stage=ppo", "frobnicate").error
    assert workplace.call("eval_policy", "outputs/x").error.endswith("allowed: stage=eval_policy")


@pytest.mark.parametrize(
    ("override", "stage"),
    [
        ("ppo.kl_coef=1", "ppo"), ("++sft.x.y=1", "sft"), ("~rm.lr", "rm"), ("sft={lr: 1}", "sft"),
        ("advantage=rloo", "ppo"), ("stage_model@ppo=ppo_tiny", "ppo"), ("seed=1", None),
        ("model=tiny", None), ("stage=sft", None), ("+stages=mine", None), ("dpo.beta=1", None),
        ("+reward@reward.components.ppo=head", None), ("stage_model@trainer=null", None),
    ],
)  # fmt: skip
def test_an_override_belongs_to_the_stage_whose_section_it_sets(
    override: str, stage: str | None
) -> None:
    (parsed,) = parse_overrides([override])
    assert stage_of(parsed, ["sft", "rm", "ppo", "eval"]) == stage
