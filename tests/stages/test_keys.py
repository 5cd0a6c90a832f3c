"""Keys that name a metric or the way of sampling, compared with the rest of the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.evaluation.policies import differences
from lightning_rlhf.evaluation.select import metric_of
from lightning_rlhf.models.checkpoint import Final
from lightning_rlhf.runs.stage import find_stage


def of_reward(*components: str) -> Any:
    return SimpleNamespace(
        stage="ppo", definition=find_stage("ppo"), data=SimpleNamespace(judge=None),
        reward=dict.fromkeys(components),
    )  # fmt: skip


def test_a_component_is_one_of_the_reward() -> None:
    name = "eval/reward/liked"
    assert metric_of(of_reward("liked", "short"), "ppo.best", name, "max") == (name, "max")
    for components in (("short", "steady"), ("liked",)):  # a single one has no metric of its own
        with pytest.raises(
            ConfigError, match=r"^ppo\.best\.metric is 'eval/reward/liked'; allowed"
        ):
            metric_of(of_reward(*components), "ppo.best", name, "max")
    with pytest.raises(ConfigError, match=r"allowed: .*eval/reward/short, eval/reward/steady"):
        metric_of(of_reward("short", "steady"), "ppo.stop", "eval/reward/", "max")


def test_policies_trained_with_other_sampling_are_named() -> None:
    now = {"temperature": 1.0, "max_response_tokens": 8, "stop_strings": []}
    settings: Any = SimpleNamespace(stage="eval_policy", tree={"eval_policy": now})

    def policy(stage: str, **then: Any) -> Any:
        manifest = SimpleNamespace(stage=stage, config={stage: then})
        return SimpleNamespace(manifest=manifest)

    policies = {"sft": policy("sft", lr=1.0), "same": policy("ppo", **now)}
    assert not list(differences(settings, policies | {"hub": SimpleNamespace(manifest=None)}, None))
    policies["warm"] = policy("ppo", **now | {"temperature": 0.7})
    policies["own"] = policy("own", **now | {"stop_strings": ["."]})
    assert list(differences(settings, policies, None)) == [
        "warm was trained with ppo.temperature 0.7, is sampled with 1.0; own was trained with "
        "own.stop_strings ['.'], is sampled with [] (keys of this stage: eval_policy.temperature, "
        "max_response_tokens, stop_strings)"
    ]


def test_policies_trained_from_another_sft_model_are_named(tmp_path: Path) -> None:
    settings: Any = SimpleNamespace(stage="eval_policy", tree={"eval_policy": {}})

    def final(name: str, text: str, parent: str | None = None) -> Final:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
        parents = {} if parent is None else {"sft": f"../{parent}"}
        manifest: Any = SimpleNamespace(parents=parents, stage="ppo", config={})
        return Final(path=tmp_path / name, manifest=manifest)

    sft, _, _ = final("sft", "a"), final("copy", "a"), final("other", "b")
    policies = {"own": final("own", "c", "sft"), "same": final("same", "c", "copy"),
                "hub": final("hub", "c")}  # fmt: skip
    assert not list(differences(settings, policies, sft))
    policies["strange"] = final("strange", "c", "other")
    assert not list(differences(settings, policies, None))
    assert list(differences(settings, policies, sft)) == [
        f"strange ({tmp_path}/strange) was trained from {tmp_path}/other; KL and gains are those "
        f"to {tmp_path}/sft"
    ]
