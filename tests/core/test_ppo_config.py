"""Every bound of PPO's configuration, every pair of values that do not go together."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from lightning_rlhf.core import ppo_config as names
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.ppo_config import GROUPED

from .configs import PPO, STAGE, ppo_config

AT_LEAST_1 = "a whole number and >= 1"
COUNTS = (
    "iterations",
    "rollout_batch_size",
    "samples_per_prompt",
    "max_response_tokens",
    "ppo_epochs",
    "minibatch_size",
    "ptx_batch_size",
    "val_samples_per_prompt",
    "samples_every",
)
TEXTS = "a list of texts, none of them empty"
ABOVE_0 = ("kl_target", "kl_horizon", "value_lr_factor")
ABOVE_0_OR_NULL = ("score_clip", "clip_range_high", "clip_range_vf", "target_kl", "kl_warning")
AT_LEAST_0 = (
    "length_penalty",
    "missing_eos_penalty",
    "kl_coef",
    "kl_coef_end",
    "ent_coef",
    "ptx_coef",
    "vf_coef",
)
UNIT = "a number and >= 0 and <= 1"
BOUNDS: list[tuple[str, Any, str]] = [
    *[(key, 0, AT_LEAST_1) for key in COUNTS],
    *[(key, 1.0, AT_LEAST_1) for key in COUNTS],
    *[(key, 0, "a number and > 0") for key in ABOVE_0],
    *[("temperature", low, "a number and >= 1e-06") for low in (0, 1e-300)],
    *[(key, 0, "a number and > 0, or null") for key in ABOVE_0_OR_NULL],
    *[(key, -1e-9, "a number and >= 0") for key in AT_LEAST_0],
    ("generation_batch_size", 0, f"{AT_LEAST_1}, or null"),
    ("critic_warmup", -1, "a whole number and >= 0"),
    ("critic_warmup", 0.5, "a whole number and >= 0"),
    *[("clip_range", end, "a number and > 0 and < 1") for end in (0, 1)],
    ("dual_clip", 1, "a number and > 1, or null"),
    ("max_ratio", 1, "a number and > 1, or null"),
    *[(key, end, UNIT) for key in ("gamma", "gae_lambda") for end in (-1e-9, 1 + 1e-9)],
    ("whiten_rewards", "yes", "true, false"),
    ("whiten_rewards", 1, "true, false"),
]
CHOICES: dict[str, str] = {
    "rollout": "native, hf, 'path/to/file.py:Class' or 'package.module:Class'",
    "score_normalization": "none, running, running_scale",
    "missing_eos": "none, subtract, replace",
    "kl_estimator": "k1, k2, k3, abs, mse, full",
    "kl_in": "reward, loss",
    "kl_control": "fixed, linear, adaptive",
    "advantage": "gae, rloo, grpo, dr_grpo, reinforce++",
    "whiten_advantages": "none, batch, minibatch",
    "loss_reduction": "token_mean, sequence_mean, constant",
    "critic": "head, adapter, model",
    "critic_init": "zero, reward",
}
OFF_SWITCHES = (
    "score_clip",
    "clip_range_high",
    "dual_clip",
    "clip_range_vf",
    "target_kl",
    "max_ratio",
    "kl_warning",
)


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        ppo_config(**changes)
    return str(error.value)


@pytest.mark.parametrize(("key", "found", "allowed"), BOUNDS)
def test_out_of_bounds(key: str, found: Any, allowed: str) -> None:
    assert refusal(**{key: found}) == f"ppo.{key} is {found!r}; allowed: {allowed}"


@pytest.mark.parametrize(("key", "allowed"), CHOICES.items())
def test_no_such_choice(key: str, allowed: str) -> None:
    for found in ("sometimes", "", None, True):
        assert refusal(**{key: found}) == f"ppo.{key} is {found!r}; allowed: {allowed}"


@pytest.mark.parametrize("key", OFF_SWITCHES)
@pytest.mark.parametrize("found", [math.nan, math.inf, "2.0", True])
def test_none_or_a_finite_number(key: str, found: Any) -> None:
    assert refusal(**{key: found}).startswith(f"ppo.{key} is {found!r}; allowed: a number")


@pytest.mark.parametrize("found", ["END", {"END": 1}, None])
def test_stop_strings_are_a_tuple_of_texts(found: Any) -> None:
    # A text alone would be read letter by letter, and stop every response at an E.
    assert refusal(stop_strings=found) == f"ppo.stop_strings is {found!r}; allowed: {TEXTS}"


def test_a_list_of_stop_strings_becomes_a_tuple() -> None:
    assert ppo_config(stop_strings=["END", "\n"]).stop_strings == ("END", "\n")


@pytest.mark.parametrize("text", ["", 7, None])
def test_a_stop_string_is_a_text_of_some_length(text: Any) -> None:
    message = f"ppo.stop_strings is {text!r}; allowed: {TEXTS}"
    assert refusal(stop_strings=("END", text)) == message


@pytest.mark.parametrize(
    "changes",
    [
        *[{key: 0} for key in (*AT_LEAST_0, "critic_warmup", "gamma", "gae_lambda")],
        *[{key: 1} for key in ("gamma", "gae_lambda", "iterations", "samples_every")],
        *[{key: None} for key in OFF_SWITCHES],
        *[{key: 1e-6} for key in (*ABOVE_0, *ABOVE_0_OR_NULL)],
        *[{key: 1 + 1e-6} for key in ("dual_clip", "max_ratio", "clip_range_high")],
        {"clip_range": 1 - 1e-6},
        {"whiten_rewards": True},
        {"stop_strings": ("END", "\n\n")},
        {"critic_warmup": 9},  # of 10 iterations
        {"rollout_batch_size": 8, "minibatch_size": 8, "microbatch_size": 8},
        {"rollout_batch_size": 1, "minibatch_size": 1, "microbatch_size": 1},
        {"rollout_batch_size": 8, "samples_per_prompt": 8},
        *[{key: c} for key, choices in CHOICES.items() if key != "advantage"
          for c in choices.split(", ")],
        *[{"advantage": name, "samples_per_prompt": 2} for name in GROUPED],
        *[{"advantage": name} for name in ("gae", "reinforce++")],
        *[{"kl_in": "loss", "kl_estimator": k} for k in ("k2", "k3", "abs", "mse", "full")],
        {"kl_in": "reward", "kl_estimator": "k1"},
        {"kl_control": "adaptive", "kl_coef": 1e-6},
        {"kl_control": "linear", "kl_coef": 0, "kl_coef_end": 0.1},
    ],
)  # fmt: skip
def test_the_ends_that_are_allowed(changes: dict[str, Any]) -> None:
    # Where a choice asks for something of another key, that is given.
    wanted = {"kl_estimator": "k3"} if changes.get("kl_in") == "loss" else {}
    wanted |= {"critic": "adapter"} if changes.get("critic_init") == "reward" else {}
    config = ppo_config(**wanted | changes)
    for key, value in changes.items():
        assert getattr(config, key) == value


@pytest.mark.parametrize(
    ("small", "smaller", "large", "larger"),
    [
        ("minibatch_size", 24, "rollout_batch_size", 64),
        ("microbatch_size", 3, "minibatch_size", 4),
        ("samples_per_prompt", 3, "rollout_batch_size", 8),
        ("samples_per_prompt", 16, "rollout_batch_size", 8),
    ],
)
def test_sizes_that_do_not_divide(small: str, smaller: int, large: str, larger: int) -> None:
    message = f"ppo.{large} is {larger}, which ppo.{small} = {smaller} does not divide"
    divisors = [str(n) for n in range(1, larger + 1) if larger % n == 0]
    message += f"; allowed for ppo.{small}: {', '.join(divisors)}"
    assert refusal(**{small: smaller, large: larger}) == message


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        *[
            ({"advantage": name, "samples_per_prompt": 1}, "samples_per_prompt",
             f"at least 2, which advantage={name} compares")
            for name in ("rloo", "grpo", "dr_grpo")
        ],
        ({"kl_in": "loss", "kl_estimator": "k1"}, "kl_estimator",
         "k2, k3, abs, mse, full where ppo.kl_in=loss"),
        ({"critic": "head", "critic_init": "reward"}, "critic",
         "adapter, model where ppo.critic_init=reward"),
        ({"kl_control": "adaptive", "kl_horizon": 1.6, "rollout_batch_size": 8}, "kl_horizon",
         "> 1.6, a fifth of ppo.rollout_batch_size"),
        ({"kl_control": "adaptive", "kl_coef": 0.0}, "kl_coef",
         "a number > 0 to start from where ppo.kl_control=adaptive"),
        *[
            ({"advantage": name, "samples_per_prompt": 2, "critic_warmup": 1}, "critic_warmup",
             f"0, since advantage={name} has no critic")
            for name in ("rloo", "grpo", "dr_grpo", "reinforce++")
        ],
        ({"advantage": "reinforce++", "critic": "model"}, "critic",
         "head, since advantage=reinforce++ has no critic"),
        ({"critic_warmup": 10}, "critic_warmup", "< ppo.iterations, 10"),
        ({"vf_coef": 0.0, "critic_warmup": 1}, "vf_coef",
         "a number > 0 where ppo.critic_warmup"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together(changes: dict[str, Any], key: str, reason: str) -> None:
    message = refusal(**changes)
    assert message.startswith(f"ppo.{key} is {changes[key]!r}; allowed: {reason}")


def test_the_tables_above_cover_every_field_of_ppo() -> None:
    covered = {key for key, *_ in BOUNDS} | set(CHOICES) | {"stop_strings"}
    assert covered == set(PPO) - set(STAGE)
    assert set(GROUPED) < set(get_args(names.Advantage))


@pytest.mark.parametrize("advantage", ["gae", "rloo", "grpo", "dr_grpo", "reinforce++"])
def test_only_gae_has_a_critic(advantage: str) -> None:
    config = ppo_config(advantage=advantage, samples_per_prompt=2)
    assert config.has_critic is (advantage == "gae")


def test_prompts_times_samples_is_the_rollout_batch() -> None:
    assert ppo_config(rollout_batch_size=8, samples_per_prompt=1).prompts_per_iteration == 8
    assert ppo_config(rollout_batch_size=8, samples_per_prompt=4).prompts_per_iteration == 2
