"""Keys that name a metric or the way of sampling, compared with the rest of the configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.evaluation.policies import check_policies
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
    refused = r"^ppo\.best\.metric is 'eval/reward/liked'; allowed"
    for components in (("short", "steady"), ("liked",)):  # a single one has no metric of its own
        with pytest.raises(ConfigError, match=refused):
            metric_of(of_reward(*components), "ppo.best", name, "max")
    with pytest.raises(ConfigError, match=r"allowed: .*eval/reward/short, eval/reward/steady"):
        metric_of(of_reward("short", "steady"), "ppo.stop", "eval/reward/", "max")


def run_of(sft: Final | None, **sampling: Any) -> Any:
    tree = {"eval_policy": sampling}
    settings = SimpleNamespace(stage="eval_policy", tree=tree)
    return SimpleNamespace(settings=settings, parents={} if sft is None else {"sft": sft})


def notes(capsys: pytest.CaptureFixture[str], run: Any, policies: Any) -> list[str]:
    check_policies(run, policies, "key")
    return " ".join(capsys.readouterr().out.split()).replace(" was trained", "\n").splitlines()


def test_policies_trained_with_other_sampling_or_from_another_model_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"temperature": 1.0, "max_response_tokens": 8, "stop_strings": []}

    def final(name: str, text: str, parent: str | None, **then: Any) -> Final:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
        parents = {} if parent is None else {"sft": f"../{parent}"}
        same = {"base": "b", "base_seed": 0, "tokenizer_hash": "t", "chat_template": "c"}
        manifest: Any = SimpleNamespace(parents=parents, stage="ppo", config={"ppo": then}, **same)
        return Final(path=tmp_path / name, manifest=manifest)

    sft = final("sft", "a", None)
    final("copy", "a", None)
    final("other", "b", None)
    policies = {"own": final("own", "c", "sft", **now), "same": final("same", "c", "copy", lr=1.0)}
    assert notes(capsys, run_of(sft, **now), policies) == []
    warm = {"warm": final("warm", "c", "sft", **now | {"temperature": 0.7})}
    (_, note) = notes(capsys, run_of(sft, **now), warm)
    assert note == " with ppo.temperature 0.7, is sampled with eval_policy.temperature 1.0"
    strange = {"strange": final("strange", "c", "other")}
    assert notes(capsys, run_of(None, **now), strange) == []
    (_, note) = notes(capsys, run_of(sft, **now), strange)
    assert note.endswith("/sft")
