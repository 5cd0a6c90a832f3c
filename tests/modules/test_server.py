"""Servers of vLLM as samplers: a stand-in for one, with planted faults."""

import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_rlhf.core.config import ServerConfig
from lightning_rlhf.core.errors import ConfigError, RLHFError, SamplerError
from lightning_rlhf.core.losses import PolicyOutputs
from lightning_rlhf.core.validation import build
from lightning_rlhf.models.config import POLICY
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.modules.ppo import PPOModule
from lightning_rlhf.parallel import sharding
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.rollout import answers, server
from lightning_rlhf.rollout.sampler import SamplingParams
from lightning_rlhf.runs.console import CONF

from ..matrix import matrix
from ..processes import replicated
from ..rollout.servers import StandIn, serving
from .conftest import LORA, close, language_model, prompts, sft_roles, shake
from .experiences import Make

PROBE = torch.tensor([0.0, log(3.0)])  # 1/4 and 3/4 at temperature 1, 1/10 and 9/10 at 1/2


def probed(probability: float, token: int = 1) -> tuple[int, Any]:
    choice = {"token_ids": [token], "logprobs": {"token_logprobs": [log(probability)]}}
    return 200, {"choices": [choice | {"finish_reason": "length"}]}


@pytest.mark.parametrize(
    ("loaded", "probe", "message"),
    [
        ((404, {"detail": "Not Found"}), None, "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDAT"),
        ((500, "LoRA rank 64 is greater than max_lora_rank 16."), None, "a larger --max-lora-rank"),
        ((404, "No adapter found for /x"), None, "rollout_server.adapters=FOLDER"),
        ((200, ""), (400, "token id 7 is out of vocabulary"), "a vocabulary of 2 tokens"),
        ((200, ""), probed(0.75), "--logprobs-mode processed_logprobs"),
        ((200, ""), probed(0.2), "here it is -0.1054, further apart than"),
        ((200, ""), probed(0.9, token=2), "allowed: one choice with 1 to 1 token_ids"),
        ((200, ""), probed(0.9), ""),
    ],
)
def test_what_a_server_lacks(loaded: Any, probe: Any, message: str) -> None:
    check = partial(answers.check_answers, loaded, probe, PROBE, temperature=0.5, gap=0.05)
    if not message:
        check()
        return
    with pytest.raises(RLHFError, match="allowed: ") as found:
        check()
    assert message in str(found.value)


def test_which_model_a_server_has() -> None:
    base = {"id": "b", "parent": None, "max_model_len": 9}
    models = {"data": [{"id": "a", "parent": "b"}, base]}
    assert answers.base_of((200, models), 9) == "b"
    for found, message in (
        (models, "max_model_len of the server is 9"),
        ("<html>", "is '<html>'; al"),
    ):
        with pytest.raises(ConfigError, match=message):
            answers.base_of((200, found), 10)


def configured(url: Any, **changes: Any) -> ServerConfig:
    own = {"url": url, "timeout_s": 60.0, "max_gap": 1e-4}
    shipped = OmegaConf.load(CONF / "config.yaml").rollout_server
    return build(ServerConfig, {**shipped, **own, **changes}, "rollout_server")


def sampler_of(roles: Roles, config: ServerConfig, folder: Path | str) -> server.ServerSampler:
    roles.causal_lm.name_or_path = str(folder)
    params = SamplingParams(max_response_tokens=6, temperature=0.7, end_token_ids=range(1, 9),
                            stop_strings=("~",))  # fmt: skip
    return server.ServerSampler(roles, params, config, Replicas(), 12)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with serving(Roles(language_model("qwen3"))) as found:
        yield found


@pytest.fixture
def make(make_ppo: Make, stand_in: StandIn, tmp_path: Path) -> Iterator[Make]:
    """A module that samples by the stand-in; at its end nothing is left there, or in the folder."""

    def made(config: dict[str, Any] | None = None, **changes: Any) -> PPOModule:
        module = make_ppo(temperature=0.7, **changes)
        own = configured(stand_in.url, adapters=str(tmp_path / "adapters"), **(config or {}))
        module.collector.sampler = sampler_of(module.roles, own, tmp_path)
        return module

    yield made
    server.stop()
    assert [*(tmp_path / "adapters").iterdir()] == []
    assert [*stand_in.loaded] == ["base"] or stand_in.fault == "dead"


def test_versions(make: Make, stand_in: StandIn, tmp_path: Path) -> None:
    """Each is a name of its own; the one before is unloaded, and its folder kept once more."""
    module, rollouts = make(), []
    name = module.collector.sampler.name
    for module.weights_version in range(3):
        rollouts.append(module.roll_out(prompts(5), module.generator(0, 0)))
        shake(module.roles, f"lora_B.{POLICY}.", seed=module.weights_version, size=0.3)
        kept = [f"{name}-v{n}" for n in range(module.weights_version + 1)][-2:]
        assert [*stand_in.loaded] == ["base", kept[-1]]
        assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == kept
        assert (rollouts[-1].logprobs - rollouts[-1].sampler_logprobs).abs().max() < 1e-5
    assert rollouts[0].responses.tolist() != rollouts[-1].responses.tolist()
    assert {*rollouts[0].ended.tolist()} == {True, False}
    assert stand_in.stop == ["~"]


FAULTS = [
    ("restart", ""),
    ("stale", "rollout_server.max_gap is 0.0001, but log-probabilities of the servers are"),
    ("400", "answered 400: max_tokens is too large"),
    ("dead", "gave no answer in 1 s: "),
    ("counts", "allowed: one choice with 1 to 6 token_ids, as many token_logprobs, and an end"),
    ("busy", ""),
    ("abort", ""),
    ("raw", "rollout_server.max_gap is 0.0001, but"),
    ("slow", "gave no answer in 1 s: "),
]


@pytest.mark.parametrize(("fault", "message"), matrix(FAULTS, *FAULTS[:5]))
def test_faults(
    make: Make, stand_in: StandIn, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run survives those without a message."""
    monkeypatch.setattr(server, "FEWEST", 4)
    module = make()
    sample, sampler = partial(module.roll_out, prompts(3)), module.collector.sampler
    first = sample(module.generator(0, 0))
    if fault in ("slow", "dead"):
        sampler.config = replace(sampler.config, timeout_s=1.0)
    if message:
        shake(module.roles, f"lora_B.{POLICY}.", seed=1, size=0.3)
        module.weights_version = 1
    stand_in.fault = fault
    if fault == "dead":
        stand_in.shutdown()
        stand_in.server_close()
    if not message:
        assert torch.equal(sample(module.generator(0, 0)).tokens, first.tokens)
        assert stand_in.fault == ""
        return
    with pytest.raises(SamplerError, match=message):
        sample(module.generator(0, 0))


def test_two_servers_take_turns(make: Make, stand_in: StandIn) -> None:
    batch, one, two = prompts(5), make(), make()
    expected = one.roll_out(batch, torch.Generator().manual_seed(1))
    with serving(Roles(language_model("qwen3"))) as other:
        sampler = two.collector.sampler
        sampler.config = replace(sampler.config, url=(stand_in.url, other.url))
        found = two.roll_out(batch, torch.Generator().manual_seed(1))
        assert len(other.loaded) == 2
        server.release()
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("shards", matrix([False, True], True))
def test_tokens_in_pieces_and_in_two_processes(
    make: Make, stand_in: StandIn, shards: bool, tmp_path: Path
) -> None:
    """The server is restarted before the processes sample, which may share their base."""
    batch, module = prompts(5), make()
    whole = module.roll_out(batch, torch.Generator().manual_seed(1))
    pieces = make(generation_batch_size=2).roll_out(batch, torch.Generator().manual_seed(1))

    def work(processes: Replicas) -> Any:
        module.collector.replicas = module.collector.sampler.processes = processes
        module.weights_version = 1
        if shards:
            module.roles.shard(sharding.mesh(processes.device))
        found = module.roll_out(batch, torch.Generator().manual_seed(1))
        if processes.is_first:
            module.collector.sampler.end()
        sharding.leave()
        return found

    stand_in.fault = "restart"
    for found in (pieces, *replicated(2, work, tmp_path)):
        assert torch.equal(found.tokens, whole.tokens)
        close(found.logprobs, whole.logprobs)


def test_an_sft_adapter_is_served_with_the_policy_s(stand_in: StandIn, tmp_path: Path) -> None:
    roles = sft_roles("qwen3")
    roles.add_adapter(POLICY, LORA, 3)
    shake(roles, f".{POLICY}.", seed=3, size=0.3)
    with pytest.raises(ConfigError, match="has random weights, no folder; allowed"):
        sampler_of(roles, configured([stand_in.url]), "").sync(0)
    before = [p.requires_grad for p in roles.parameters()]
    sampler_of(roles, configured([stand_in.url]), tmp_path).sync(0)  # which compares a probe
    assert ([p.requires_grad for p in roles.parameters()], roles.role) == (before, POLICY)
    folder = server._samplers[0].folder
    server.stop()
    assert not folder.exists()  # a temporary one


def test_the_loss_has_the_importance_weights(make_ppo: Make) -> None:
    """2 of a sampler that took all tokens for half as likely, and at most the cap."""
    module = make_ppo()
    experience = module.make_experience(module.roll_out(prompts(), module.generator(0, 0)))
    mask, known = experience.response_mask, experience.old_logprobs
    outputs = {"logprobs": known[mask], "entropy": known[mask], "vocabulary_kl": None}
    given = {"policy": PolicyOutputs(**outputs), "values": None}
    sampled = replace(experience, sampler_logprobs=known - log(2))
    terms = partial(module.loss_terms, sampled, mask.float(), mask.sum(), 0.0, **given)
    found = []
    for cap in (None, 1.5, 9.0):
        module.config = replace(module.config, rollout="vllm", importance_cap=cap)
        found.append(terms().policy_loss)
    close(torch.stack(found[1:]), found[0] * torch.tensor([1.5, 2.0]))


FAKE = """#!{python} -S
import sys
from http.server import BaseHTTPRequestHandler as H, HTTPServer
print(*sys.argv[1:], flush=True)
H.do_GET = lambda self: (self.send_response(200), self.end_headers())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), H).serve_forever()
"""


def test_a_server_is_started_and_ended(tmp_path: Path, capsys: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (file := tmp_path / "vllm").write_text(FAKE.format(python=sys.executable))
    file.chmod(0o755)
    config = configured(url, start=True, command=str(file), arguments=["-x"])
    begin = partial(server.start, base="base", dtype=torch.bfloat16, longest=77)
    with pytest.raises(ConfigError, match=r"command is .*: No such file"):
        begin(replace(config, command="/none"), rank=9)
    with pytest.raises(SamplerError, match="vllm serve ended; its log is "):
        begin(replace(config, command="/bin/false"), rank=9)
    server.stop()
    for rank in (9, 16):  # the second is served by the same one
        begin(config, rank=rank)
    ((process, *_),) = server._started
    server.stop()
    assert process.poll() is not None
    words = Path(capsys.readouterr().out.split()[-1]).read_text().splitlines()[0]
    assert words.startswith("serve base --host 127.0.0.1 --port ")
    assert "--dtype bfloat16 --max-model-len 77 --enable-lora --max-lora-rank 16" in words
    assert words.endswith("--generation-config vllm --logprobs-mode processed_logprobs -x")
