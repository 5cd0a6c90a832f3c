"""Sampling by servers of vLLM, which read each version of the policy's adapter from a folder."""

import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import urllib3
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.core import masking
from lightning_rlhf.core.config import ServerConfig
from lightning_rlhf.core.errors import ConfigError, SamplerError, first_line, require
from lightning_rlhf.core.records import Prompts, SampledResponses
from lightning_rlhf.data.batches import pad
from lightning_rlhf.io.storage import delete, written_whole
from lightning_rlhf.models.adapters import adapter_to_export, save_adapter
from lightning_rlhf.models.loading import quantization_of
from lightning_rlhf.models.roles import Roles, probe_tokens
from lightning_rlhf.parallel.replicas import Replicas
from lightning_rlhf.rollout.sampler import SamplingParams, response_numbers

SECTION = "rollout_server"
"""Section of the configuration that describes the servers."""
AGAIN = (408, 429, 502, 503, 504)
"""Statuses after which a request is sent again, since the server may then succeed."""
LONGEST_PAUSE_S = 30
"""Longest pause before a request is sent again, seconds; the first one is one second."""
AT_ONCE = 64
"""Number of requests of a process that wait for an answer at the same time."""
MISSING = {
    "LoRA": "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "rank": "start the server with a larger --max-lora-rank",
    "processed": "start the server with --logprobs-mode processed_logprobs",
}
"""What a server lacks -> advice."""


@dataclass(frozen=True)
class Answers:
    """What a server answered when a run asked what it serves."""

    models: Mapping[str, Any]
    """Answer to GET /v1/models."""
    loading: tuple[int, str]
    """Status and text of the answer to the request to load an adapter."""
    logprob: float
    """Log-probability of the token that follows the probe, as the server tells it, nats."""
    own: tuple[float, float]
    """Log-probability of that token here, nats: at the temperature of sampling, and at 1."""


def base_of(models: Mapping[str, Any], tokens: int) -> str:
    """Return the name of the base model that a server serves.

    tokens: number of tokens of the longest prompt and response.
    Raises ConfigError where it serves none, or none for texts of this length.
    """
    bases = [one for one in models.get("data") or () if one.get("parent") is None]
    require(bool(bases), f"what {SECTION}.url serves", models, "a vLLM server with a model")
    limit = bases[0].get("max_model_len")
    allowed = f"at least {tokens}, the longest prompt and response: --max-model-len {tokens}"
    require(limit is None or limit >= tokens, "max_model_len of the server", limit, allowed)
    return str(bases[0]["id"])


def check_answers(answers: Answers, max_gap: float) -> None:
    """Raise ConfigError unless a server serves the run's model with its adapters.

    max_gap: largest difference of a log-probability, nats.
    """
    status, text = answers.loading
    told = f"{SECTION}.url: the server answered {status} to loading an adapter: {text}"
    if status == 404:
        raise ConfigError(f"{told}; {MISSING['LoRA']}")
    if status != 200:
        raise ConfigError(f"{told}; {MISSING['rank' if 'rank' in text else 'LoRA']}")
    here, raw = answers.own
    if abs(answers.logprob - here) <= max_gap:
        return
    found = f"{SECTION}.url: the server's log-probability of a token is {answers.logprob:.4g}"
    if abs(answers.logprob - raw) <= max_gap:
        raise ConfigError(f"{found}, that before the temperature; {MISSING['processed']}")
    raise ConfigError(
        f"{found}, here it is {here:.4g}, further apart than {SECTION}.max_gap={max_gap:g}; "
        "allowed: a server of the same base weights"
    )


@dataclass(eq=False)
class ServerSampler:
    """Samples from the active role by vLLM servers.

    Each version of the role's adapters, stacked into one, is a folder and a name of its own on
    every server: a server that was not told of it answers 404, and a stale one cannot be asked. The
    model that is trained computes log-probabilities and values; the difference from the server's
    is measured.
    """

    roles: Roles
    params: SamplingParams
    config: ServerConfig
    replicas: Replicas
    longest: int
    """Number of tokens of the longest prompt and response."""
    is_exact = False

    def __post_init__(self) -> None:
        model = self.roles.causal_lm
        kind = quantization_of(model)
        if kind != "none" or not Path(model.name_or_path).is_dir():
            what = (
                f"is quantised ({kind})" if kind != "none" else "has random weights and no folder"
            )
            raise ConfigError(
                f"a rollout by vllm needs a base that a server can load, and the model's {what}; "
                "allowed: policy.checkpoint=FOLDER with the folder that `lightning-rlhf export "
                "FINAL --merge` writes of the SFT model"
            )
        self.folder = self.config.adapters and Path(self.config.adapters)
        self.name = f"lightning-rlhf-{secrets.token_hex(4)}"
        """Start of the names of this run's adapters."""
        self.version: int | None = None
        """Version of the weights that the servers have; None before the first."""
        self.served = ""
        """Name of the model that is asked for: an adapter, or the base."""
        headers = {"content-type": "application/json"}
        if self.config.token_env is not None:
            headers["authorization"] = f"Bearer {os.environ[self.config.token_env]}"
        self.pool = urllib3.PoolManager(maxsize=AT_ONCE, block=True, headers=headers, retries=False)

    def sync(self, version: int) -> None:
        """Give the servers the active role's adapters, unless they have this version of them."""
        if version == self.version:
            return
        self.served = self.replicas.first(lambda: self.publish(version))
        self.version = version

    def publish(self, version: int) -> str:
        """Write the adapters as one, have all servers load it and forget the one before.

        Returns: the name under which it is served; that of the base where the role has no adapter.
        """
        roles, before = self.roles, self.served
        if not roles.adapters(roles.role):
            return base_of(self.ask(self.config.url[0], "/v1/models")[1], self.longest)
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="lightning-rlhf-"))
        name = f"{self.name}-v{version}"
        with written_whole(self.folder / name, kind="folder") as beside:
            with adapter_to_export(roles, roles.role) as adapter:
                save_adapter(beside, roles, adapter, roles.causal_lm.name_or_path)
        for url in self.config.url:
            answer = self.load(url, name)
            if self.version is None:
                self.check(url, name, answer)
            if before:
                self.ask(url, "/v1/unload_lora_adapter", {"lora_name": before})
        if before:
            delete(self.folder / before)
        return name

    def load(self, url: str, name: str) -> tuple[int, str]:
        """Have a server load an adapter; return status and text of its answer."""
        assert self.folder is not None
        path = str((self.folder / name).resolve())
        request = {"lora_name": name, "lora_path": path}
        status, found = self.ask(url, "/v1/load_lora_adapter", request)
        is_there = status == 400 and "already been loaded" in str(found)
        return (200, "") if is_there else (status, str(found)[:300])

    def check(self, url: str, name: str, loading: tuple[int, str]) -> None:
        """Raise ConfigError unless a server can be sampled from; `check_answers` decides."""
        _, models = self.ask(url, "/v1/models")
        base_of(models, self.longest)
        probe, own, said = probe_tokens(self.roles.causal_lm), (0.0, 0.0), 0.0
        if loading[0] == 200:
            token, said, _ = self.complete(url, name, probe[0].tolist(), seed=0, tokens=1)
            logits = self.roles.probe(self.roles.role)
            own = tuple(
                float((logits / heat).log_softmax(-1)[token[0]])
                for heat in (self.params.temperature, 1.0)
            )
        check_answers(Answers(loading, said[0] if said else 0.0, own), self.config.max_gap)

    @torch.no_grad()
    def sample(
        self,
        prompts: Prompts,
        samples_per_prompt: int,
        generator: torch.Generator,
        share: Int[Tensor, " M"],
    ) -> SampledResponses:
        """Return responses with the servers' log-probabilities, as `Sampler.sample`.

        Each response has a request and a seed of its own; the servers take turns.
        """
        total = len(prompts) * samples_per_prompt
        seeds = torch.randint(2**62, (total,), generator=generator)
        numbers = response_numbers(share, samples_per_prompt).tolist()
        prompts = prompts.select(share).repeat(samples_per_prompt)
        texts = masking.real_tokens(prompts.tokens, prompts.mask)

        def respond(place: int) -> tuple[list[int], list[float], bool]:
            number = numbers[place]
            url = self.config.url[number % len(self.config.url)]
            most = self.params.max_response_tokens
            return self.complete(url, self.served, texts[place].tolist(), int(seeds[number]), most)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(respond, range(len(numbers))))
        response, response_mask = pad([tokens for tokens, _, _ in found], 0, "right")
        logprobs = torch.zeros(response.shape)
        logprobs[response_mask] = torch.tensor([x for _, some, _ in found for x in some])
        return SampledResponses(
            tokens=torch.cat([prompts.tokens.cpu(), response], dim=1),
            mask=torch.cat([prompts.mask.cpu(), response_mask], dim=1),
            response_mask=response_mask,
            ended=torch.tensor([ended for _, _, ended in found]),
            logprobs=logprobs,
            values=None,
            index=prompts.index,
        ).to(self.roles.device)

    def complete(
        self, url: str, name: str, prompt: Sequence[int], seed: int, tokens: int
    ) -> tuple[list[int], list[float], bool]:
        """Return the tokens of a response, their log-probabilities, and whether it has ended.

        A server that was restarted does not know the adapter any more, and is told of it again.
        """
        params = self.params
        request = {
            "model": name, "prompt": prompt, "seed": seed, "max_tokens": tokens,
            "temperature": params.temperature, "top_p": 1.0, "top_k": 0, "logprobs": 0,
            "stop": [*params.stop_strings], "stop_token_ids": [*params.end_token_ids],
            "include_stop_str_in_output": True, "skip_special_tokens": False,
            "return_token_ids": True,
        }  # fmt: skip
        status, found = self.ask(url, "/v1/completions", request)
        if status == 404 and self.load(url, name)[0] == 200:
            status, found = self.ask(url, "/v1/completions", request)
        if status != 200:
            raise SamplerError(f"{SECTION}.url: {url} answered {status}: {str(found)[:300]}")
        try:
            (choice,) = found["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            ended = choice["finish_reason"] == "stop"
        except (KeyError, TypeError, ValueError):
            ids, logprobs, ended = [], [], False
        if not 0 < len(ids) == len(logprobs):
            allowed = "one choice with token_ids and as many token_logprobs"
            raise SamplerError(
                f"{SECTION}.url: {url} answered {str(found)[:300]}; allowed: {allowed}"
            )
        return ids, logprobs, ended

    def ask(self, url: str, path: str, request: Any = None) -> tuple[int, Any]:
        """Return status and JSON of the answer to one request; None is a GET without a body.

        It is sent again, after a pause that doubles, where no answer comes or the server is busy.
        Raises SamplerError after `timeout_s` seconds or `retries` more tries.
        """
        config, ends, reason = self.config, time.monotonic() + self.config.timeout_s, ""
        body = None if request is None else json.dumps(request)
        for pause in (0, *(min(2**i, LONGEST_PAUSE_S) for i in range(config.retries))):
            if time.monotonic() + pause >= ends:
                break
            time.sleep(pause)
            try:
                left = max(ends - time.monotonic(), 0.01)
                method = "GET" if body is None else "POST"
                answer = self.pool.request(method, url + path, body=body, timeout=left)
            except urllib3.exceptions.HTTPError as error:
                reason = first_line(error)
                continue
            if answer.status not in AGAIN:
                text = answer.data.decode(errors="replace")
                try:
                    return answer.status, json.loads(text)
                except ValueError:
                    return answer.status, text
            reason = f"it answered {answer.status}"
        raise SamplerError(
            f"{SECTION}.url: {url} gave no answer in {config.timeout_s:g} s or "
            f"{config.retries + 1} tries: {reason}"
        )
