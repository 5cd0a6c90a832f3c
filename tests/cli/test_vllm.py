"""ppo.rollout=vllm and eval_policy.rollout=vllm by the command, with a stand-in for the server."""

import json
import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM

from lightning_rlhf.models.roles import Roles

from ..rollout.servers import serving
from .conftest import Workplace, given, pipeline, rows, weights  # noqa: F401


def test_a_run_by_a_server_resumes_bit_for_bit(pipeline: Workplace, tmp_path: Path) -> None:  # noqa: F811
    place = pipeline.copied(tmp_path / "work")
    base = Roles(AutoModelForCausalLM.from_pretrained(place.stage("sft") / "final"))
    with serving(base) as server:
        words = ["run=served", *given(place), f"rollout_server.url={server.url}"]
        words += ["rollout_server.max_gap=1e-4", f"rollout_server.adapters={tmp_path / 'adapters'}"]
        ppo = ["stage=ppo", "ppo.rollout=vllm", "ppo.importance_cap=2", "ppo.iterations=2", *words]
        ppo += ["ppo.ema_decay=0.5", "preflight=strict"]  # samples by averaged weights have no gap
        place.mini(*ppo).succeeded  # noqa: B018
        folder = place.stage("ppo", "served")
        expected = weights(folder), rows(folder)
        found = [
            float(row["rollout/logprob_gap_max"]) for row in expected[1] if "reward_mean" in row
        ]
        assert len(found) == 2
        assert max(found) < 1e-5
        shutil.rmtree(folder / "final")
        place.mini(*ppo, "resume=1").succeeded  # noqa: B018
        assert (weights(folder), rows(folder)) == expected
        compared = ["eval_policy.rollout=vllm", f"eval_policy.policies=[{folder / 'final'}]"]
        compared += ["eval_policy.samples_per_prompt=1", *words]
        place.mini("stage=eval_policy", *compared).succeeded  # noqa: B018
        assert [*server.loaded] == ["base"]
        assert [*(tmp_path / "adapters").iterdir()] == []
    final = place.stage("eval_policy", "served") / "final"
    assert set(json.loads((final / "evaluation.json").read_text())["policies"]) >= {"ppo"}
    refused = place.mini(*ppo, "ppo.finetune=full", "run=full").error
    assert refused.startswith("ppo.rollout is 'vllm'; allowed: native, hf where ppo.finetune=full")
