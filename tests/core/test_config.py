"""Bounds of every stage's configuration, and every pair of values that do not go together."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.experience import ADVANTAGES
from lightning_rlhf.core.ppo_config import GROUPED, PPOConfig
from lightning_rlhf.core.validation import allowed
from lightning_rlhf.core.validation import build as from_section

from .configs import STAGES, ppo_config


def refusal(stage: str = "ppo", **changes: Any) -> str:
    config, valid = STAGES[stage]
    with pytest.raises(ConfigError) as error:
        from_section(config, valid | changes, stage)
    return str(error.value)


@pytest.mark.parametrize("stage", STAGES)
def test_every_field_is_checked_and_has_no_default(stage: str) -> None:
    """A number must be finite; "1e-5" is what YAML makes of 1e-5 written without a point.

    A text alone is no list of texts: it would be read letter by letter.
    """
    config, valid = STAGES[stage]
    for key in (field.name for field in fields(config)):
        assert refusal(stage, **{key: object()}).startswith(f"{stage}.{key} is ")
        with pytest.raises(ConfigError) as error:
            from_section(config, {k: v for k, v in valid.items() if k != key}, stage)
        assert str(error.value) == f"{stage}.{key} is missing from the configuration"
        if isinstance(valid[key], list):
            assert refusal(stage, **{key: "END"}).startswith(f"{stage}.{key} is 'END'; allowed: ")
        if isinstance(valid[key], int | float) and not isinstance(valid[key], bool):
            for found in (math.nan, -math.inf, "1e-5", None, True):
                start = f"{stage}.{key} is {found!r}; allowed: a "
                assert refusal(stage, **{key: found}).startswith(start)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"advantage": "rloo", "samples_per_prompt": 1}, "samples_per_prompt",
         "at least 2, which advantage=rloo compares"),
        ({"kl_control": "adaptive", "kl_horizon": 1.6, "rollout_batch_size": 8}, "kl_horizon",
         "> 1.6, a fifth of ppo.rollout_batch_size"),
        ({"kl_control": "adaptive", "kl_coef": 0.0}, "kl_coef",
         "a number > 0 to start from where ppo.kl_control=adaptive"),
        ({"advantage": "rloo", "samples_per_prompt": 2, "critic_warmup": 1}, "critic_warmup",
         "0, since advantage=rloo has no critic"),
        ({"advantage": "gdpo", "samples_per_prompt": 2, "kl_in": "loss", "kl_estimator": "k2",
          "score_clip": 5.0}, "score_clip", "null where ppo.advantage=gdpo"),
        ({"advantage": "remax", "rollout": "vllm"}, "rollout",
         "native, hf where ppo.advantage=remax"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip",
         "null where ppo.policy_loss=cispo, which has no clipped surrogate"),
        ({"vf_coef": 0.0, "critic_warmup": 1}, "vf_coef",
         "a number > 0 where ppo.critic_warmup"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together(changes: dict[str, Any], key: str, reason: str) -> None:
    assert refusal(**changes).startswith(f"ppo.{key} is {changes[key]!r}; allowed: {reason}")


def test_numbers_that_follow_from_others() -> None:
    words = allowed(get_type_hints(PPOConfig, include_extras=True)["advantage"])
    own = [name for name in ADVANTAGES if ":" not in name]  # the rest are of other tests
    assert words.split(", ")[:-1] == own
    for advantage in own:
        gdpo = {"kl_in": "loss", "kl_estimator": "k2"} if advantage == "gdpo" else {}
        config = ppo_config(advantage=advantage, samples_per_prompt=2, **gdpo)
        assert config.has_critic is (advantage == "gae")
        assert config.group_size == (2 if advantage in GROUPED else 1)
    for vf_coef in (0.0, 0.1):
        config = ppo_config(advantage="a.py:f", samples_per_prompt=2, vf_coef=vf_coef)
        assert (config.has_critic, config.group_size) == (vf_coef > 0, 2)
    config = ppo_config(rollout_batch_size=8, samples_per_prompt=4)
    assert config.prompts_per_iteration == 2
    # A run shorter than val_every validates at each tenth.
    steps = {1: 1, 9: 1, 25: 3, 99: 10, 100: 100, 2000: 100}
    config = ppo_config(val_every=100)
    assert {count: config.validation_interval(count) for count in steps} == steps
