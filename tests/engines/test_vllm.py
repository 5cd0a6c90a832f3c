"""The real vLLM as a sampler, in an environment of its own: `make vllm-check` writes a table.

LIGHTNING_RLHF_VLLM names its executable. It shares the cores with the run.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from omegaconf import OmegaConf

from lightning_rlhf.callbacks.files import read_rows
from lightning_rlhf.core.config import ServerConfig
from lightning_rlhf.core.validation import build
from lightning_rlhf.rollout import server
from lightning_rlhf.runs.console import CONF, HOME

from ..cli.conftest import TRAIN_PY, rows, weights

VLLM = os.environ.get("LIGHTNING_RLHF_VLLM", "")
RUN = HOME / "outputs" / "vllm_check" / "tiny"
ITERATIONS, STOP = 40, 20
URL = "http://127.0.0.1:8017"
ABOUT = """# vLLM as a sampler

{date}; {machine}, other work on it; vLLM {version} in an environment of its own, torch {torch}. \
Written by `make vllm-check`.

{iterations} iterations of the quickstart's `stage=ppo` after its `stage=sft` and `stage=rm`, seed \
0, 64 responses of at most 48 tokens an iteration, float32 on both sides, the server on the cores \
of the run.

| what | found | wanted |
|---|---|---|
"""


def train(*words: str, resume: object = "auto") -> None:
    command = [*TRAIN_PY, "run=vllm_check", f"resume={resume}", *words]
    subprocess.run(command, cwd=HOME, check=True, timeout=3000)


@pytest.mark.skipif(not VLLM, reason="LIGHTNING_RLHF_VLLM names no vLLM")
def test_forty_iterations_of_the_quickstart(tmp_path: Path) -> None:
    for stage in ("sft", "rm"):
        train(f"stage={stage}")
    own = {"url": URL, "command": VLLM, "start": True, "timeout_s": 900.0}
    own["arguments"] = ["--gpu-memory-utilization", "0.2", "--enforce-eager"]
    shipped = OmegaConf.load(CONF / "config.yaml").rollout_server
    config = build(ServerConfig, {**shipped, **own}, "rollout_server")
    began = time.monotonic()
    server.start(config, str(RUN / "sft" / "final"), torch.float32, 16, 512)
    seconds = time.monotonic() - began
    try:
        ppo = ["stage=ppo", "ppo.rollout=vllm", f"ppo.iterations={ITERATIONS}"]
        ppo += [f"ppo.val_every={STOP}", f"ppo.checkpoint_every={STOP}"]
        ppo += [f"rollout_server.url={URL}", f"rollout_server.adapters={tmp_path}"]
        train(*ppo)
        whole = weights(RUN / "ppo"), rows(RUN / "ppo")
        trained = [*read_rows(RUN / "ppo" / "metrics.csv").values()]
        shutil.rmtree(RUN / "ppo" / "final")
        train(*ppo, resume=STOP)
        assert (weights(RUN / "ppo"), rows(RUN / "ppo")) == whole
    finally:
        server.stop()
    names = ("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "time/rollout_s")
    names += ("eval/reward_mean",)
    gaps, largest, sampled, reward = ([r[n] for r in trained if n in r] for n in names)
    assert len(gaps) == ITERATIONS
    assert max(gaps) < 1e-5
    assert reward[-1] - reward[0] >= 0.3
    version = subprocess.run([VLLM, "--version"], capture_output=True, text=True, check=True)
    info = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.partition(": ")[2] for line in info if line.startswith("model name"))
    about = {"date": time.strftime("%Y-%m-%d"), "machine": f"{name}, {os.cpu_count()} cores"}
    about |= {"version": version.stdout.split()[-1], "torch": torch.__version__}
    text = ABOUT.format(**about, iterations=ITERATIONS)
    for row in (
        ("largest mean gap of an iteration, nats a token", f"{max(gaps):.1e}", "below 1e-5"),
        ("largest gap of a token, nats", f"{max(largest):.1e}", ""),
        ("`eval/reward_mean`", f"{reward[0]:.2f} to {reward[-1]:.2f}", "a gain of 0.3"),
        (f"resumed at iteration {STOP} on the live server", "bit for bit", "bit for bit"),
        ("seconds until the server answered", f"{seconds:.0f}", ""),
        ("seconds of sampling in an iteration, median", f"{median(sampled):.1f}", ""),
    ):
        text += f"| {' | '.join(row)} |\n"
    (HOME / "benchmarks" / "results" / "vllm.md").write_text(text)
