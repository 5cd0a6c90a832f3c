"""Sampling by servers of vLLM, which read each version of the policy's adapter from a folder.

A version has a name of its own on the servers and is never changed in place: a server that was not
sent it answers 404, and an earlier one cannot be sampled from by mistake.
"""

import atexit
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import urllib3
from jaxtyping import Int
from torch import Tensor

from lightning_rlhf.core import logprobs, masking, records
from lightning_rlhf.core.config import ServerConfig
from lightning_rlhf.core.errors import ConfigError, SamplerError, first_line, refusal, require
from lightning_rlhf.data.batches import pad
from lightning_rlhf.io import console, storage
from lightning_rlhf.models import heads, loading, roles
from lightning_rlhf.parallel import replicas, world
from lightning_rlhf.rewards.config import token_in
from lightning_rlhf.rollout.answers import SECTION, Answer, base_of, check_answers, choice_of
from lightning_rlhf.rollout.sampler import BatchSampler, response_numbers

MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
AGAIN = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is sent again, since the server may then succeed."""
LONGEST_PAUSE_S = 30
"""Longest pause before a request is sent again, seconds; the first one is one second."""
PREFIX = "lightning-rlhf-"
"""Start of the names of all adapters."""
FEWEST = 32
"""Smallest number of tokens by which servers are judged to sample from other weights."""
AT_ONCE = 256
"""Number of requests of a process that wait for an answer at the same time."""
COLDEST, GREEDY = 1e-2, 1e-5
"""Lowest temperature that vLLM samples at, and the one below which it takes the likeliest token."""
UNLOAD_S = 3
"""Time in which all servers are notified that a run has ended, seconds."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""


@dataclass(eq=False)
class ServerSampler(BatchSampler):
    """Samples from the active role by servers of vLLM, at the precision that they have.

    The role's adapters are stacked into one. The model that is trained computes log-probabilities
    and values; how far the servers' own are from them is measured.
    """

    config: ServerConfig
    processes: replicas.Replicas
    """Processes of the run, of which the first writes the adapters."""
    longest: int
    """Number of tokens of the longest prompt and response."""
    is_exact = False

    def __post_init__(self) -> None:
        self.name = PREFIX + os.urandom(4).hex()
        """Start of the names of the adapters, of this sampler alone."""
        self.version: int | None = None
        """Version of the weights that the servers have; None before the first."""
        self.served = dict[str, str]()
        """Server -> name of the model that is asked for, an adapter or the base."""
        self.folder = Path()
        """Folder of adapters."""
        self.written: list[str] = []
        """Names of the latest versions in the folder, the oldest first."""
        heat = self.params.temperature
        self.temperature = heat if heat >= GREEDY else 0.0
        servers = len(self.config.url)
        self.pool = urllib3.PoolManager(servers, maxsize=AT_ONCE, block=True, retries=False)

    def draw(self, responses: int, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the seeds of a whole batch of so many responses."""
        return torch.randint(2**62, (responses,), generator=generator)

    def sync(self, version: int) -> None:
        """Give the servers the active role's adapters, unless they have this version of them.

        Raises ConfigError where a server, asked for the first time, does not fit the model.
        """
        if version == self.version:
            return
        logits = None
        if self.version is None:
            self.prepare()
            logits = self.roles.probe(self.roles.role)  # by all, which may share the weights
        self.served, self.folder = self.processes.first(lambda: self.publish(version, logits))
        self.version = version

    def prepare(self) -> None:
        """Set up the requests. Raises ConfigError where no server can sample from the model."""
        model, heat = self.roles.causal_lm, self.params.temperature
        kind = loading.quantization_of(model)
        if kind != "none" or not (model.name_or_path and Path(model.name_or_path).is_dir()):
            has = f"is quantised ({kind})" if kind != "none" else "has random weights, no folder"
            raise ConfigError(
                f"rollout=vllm needs a base that a server can load, and the model's {has}; "
                "allowed: policy.checkpoint=FOLDER, which `lightning-rlhf export SFT/final --merge "
                "--out FOLDER` writes"
            )
        cold = f"at least {COLDEST} where rollout=vllm, which samples no colder"
        require(heat >= COLDEST or heat < GREEDY, "temperature", heat, cold)
        if self.config.token_env is not None:
            token = token_in(self.config.token_env, f"{SECTION}.token_env")
            self.pool.headers = {"authorization": f"Bearer {token}"}

    def publish(self, version: int, logits: Tensor | None) -> tuple[dict[str, str], Path]:
        """Write the adapters as one, have all servers load it, and unload the one before.

        The folder of a version is deleted when the second one after it is published.

        logits: `probe` of the role, with which servers are checked that were not asked before.
        Returns: `served` and `folder` from now on.
        """
        config, model, stack = self.config, self.roles, self.roles.adapters(self.roles.role)
        name, base = f"{self.name}-v{version}", model.causal_lm.name_or_path
        if logits is not None:
            atexit.register(stop)
            if config.start:
                rank = sum(model.model.peft_config[name].r for name in stack)
                start(config, base, model.causal_lm.dtype, rank, self.longest)
            up = f"the address of a server that answers, or {SECTION}.start=true"
            down = [url for url in config.url if not is_up(url)]
            require(not down, f"{SECTION}.url", ", ".join(down), up)
            folder = Path(config.adapters or tempfile.mkdtemp(prefix=PREFIX))
            self.folder = folder.expanduser().absolute()  # a link may lead elsewhere on a server
            _samplers.append(self)
        if stack:
            place = storage.written_whole(self.folder / name, kind="folder")
            with place as temporary, model.stacked(model.role) as adapter:
                heads.save_adapter(temporary, model.model, adapter, base)
            self.written.append(name)
        served = dict.fromkeys(config.url, name) if stack else dict(self.served)
        for url in config.url:
            answer = self.load(url, self.folder / name) if stack else (200, "")
            if logits is not None:
                served[url] = self.check(url, name, answer, logits)
            elif answer[0] != 200:
                answered = f"{answer[0]} to loading an adapter: {str(answer[1])[:300]}"
                raise SamplerError(f"{SECTION}.url: {url} answered {answered}")
            for old in self.written[-2:-1]:
                self.ask(url, UNLOAD, {"lora_name": old})
        while len(self.written) > 2:
            with suppress(OSError):
                storage.delete(self.folder / self.written.pop(0))
        return served, self.folder

    def load(self, url: str, folder: Path, ends: float | None = None) -> Answer:
        """Have a server load an adapter under the name of its folder; return its answer."""
        request = {"lora_name": folder.name, "lora_path": str(folder)}
        status, found = self.ask(url, LOAD, request, ends)
        is_there = status == 400 and "already been loaded" in str(found)
        return (200, "") if is_there else (status, found)

    def check(self, url: str, name: str, loaded: Answer, logits: Tensor) -> str:
        """Raise ConfigError unless a server can be sampled from; `check_answers` decides.

        Returns: the name to ask for, that of the base where the role has no adapter.
        """
        base, probe = base_of(self.ask(url, MODELS), self.longest), (0, None)
        served = name if self.written else base
        if loaded[0] == 200:
            tokens = roles.probe_tokens(self.roles.causal_lm)[0].tolist()
            probe = self.ask(url, COMPLETIONS, self.request(served, tokens, seed=0, most=1))
        heat = self.temperature
        check_answers(loaded, probe, logits, temperature=heat, gap=self.config.max_gap)
        return served

    @torch.no_grad()
    def sample(
        self,
        prompts: records.Prompts,
        samples_per_prompt: int,
        generator: torch.Generator,
        share: Int[Tensor, " M"],
    ) -> records.SampledResponses:
        """Return responses with the servers' log-probabilities, as `Sampler.sample`.

        Each response has a request and a seed of its own; the servers take turns.
        """
        seeds = self.draw(len(prompts) * samples_per_prompt, generator).tolist()
        numbers = response_numbers(share, samples_per_prompt).tolist()
        prompts = prompts.select(share).repeat(samples_per_prompt)
        texts = masking.real_tokens(prompts.tokens, prompts.mask)

        def respond(place: int) -> tuple[list[int], list[float], bool]:
            number = numbers[place]
            url = self.config.url[number % len(self.config.url)]
            return self.complete(url, texts[place], seeds[number])

        with ThreadPoolExecutor(min(AT_ONCE, len(numbers))) as threads:
            found = list(threads.map(respond, range(len(numbers))))
        response, response_mask = pad([tokens for tokens, _, _ in found], 0, "right")
        drawn = torch.zeros(response.shape)
        drawn[response_mask] = torch.tensor([x for _, some, _ in found for x in some])
        return records.SampledResponses(
            tokens=torch.cat([prompts.tokens.cpu(), response], dim=1),
            mask=torch.cat([prompts.mask.cpu(), response_mask], dim=1),
            response_mask=response_mask,
            ended=torch.tensor([ended for _, _, ended in found]),
            logprobs=drawn if self.temperature else None,  # greedy ones are those at 1
            values=None,
            index=prompts.index.cpu(),
        ).to(self.roles.device)

    def complete(
        self, url: str, prompt: list[int], seed: int
    ) -> tuple[list[int], list[float], bool]:
        """Return the tokens of a response, their log-probabilities, and whether it has ended.

        A server that was restarted does not know the adapter any more, and loads it again.
        """
        most, ends = self.params.max_response_tokens, time.monotonic() + self.config.timeout_s
        name = self.served[url]
        request = self.request(name, prompt, seed=seed, most=most)
        status, found = self.ask(url, COMPLETIONS, request, ends)
        if status == 404 and name.startswith(PREFIX):
            status, found = self.load(url, self.folder / name, ends)
            if status == 200:
                status, found = self.ask(url, COMPLETIONS, request, ends)
        if status != 200:
            raise SamplerError(f"{SECTION}.url: {url} answered {status}: {str(found)[:300]}")
        return choice_of(found, most, self.roles.vocab_size)

    def request(self, name: str, prompt: list[int], *, seed: int, most: int) -> dict[str, Any]:
        """Return the body of a request for a response of at most so many tokens."""
        params = self.params
        drawn = {"temperature": self.temperature, "top_p": 1.0, "top_k": 0, "ignore_eos": True}
        drawn |= {"min_p": 0.0, "repetition_penalty": 1.0}  # in place of generation_config.json
        drawn |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        ends = {"stop": [*params.stop_strings], "stop_token_ids": [*params.end_token_ids]}
        returned = {"logprobs": 0, "return_token_ids": True, "include_stop_str_in_output": True}
        body = {"model": name, "prompt": prompt, "seed": seed, "max_tokens": most}
        return {**body, **drawn, **ends, **returned, "skip_special_tokens": False}

    def check_gap(self, rollout: records.Rollout) -> None:
        """Raise SamplerError where the servers sampled from another model than the one here."""
        sampled = rollout.sampler_logprobs
        if sampled is None or rollout.response_mask.sum() < FEWEST:
            return
        mean, largest = logprobs.logprob_gap(rollout.logprobs, sampled, rollout.response_mask)
        if not mean <= self.config.max_gap:
            raise SamplerError(
                f"{SECTION}.max_gap is {self.config.max_gap:g}, but log-probabilities of the "
                f"servers are {mean:.3g} nats a token away from those here (at most {largest:.3g});"
                " allowed: servers of this base and dtype, with --logprobs-mode processed_logprobs"
            )

    def ask(self, url: str, path: str, request: Any = None, ends: float | None = None) -> Answer:
        """Return status and JSON or text of the answer to a request; None is a GET without a body.

        It is sent again, after a pause that doubles, where no answer comes, where the server is
        busy, and where it ended a response because it stops itself.

        ends: time.monotonic() at which to give up; None for `timeout_s` seconds from now.
        Raises SamplerError then.
        """
        config, reason, pause = self.config, "it took too long", 0
        ends = time.monotonic() + config.timeout_s if ends is None else ends
        method, sent = ("GET", {}) if request is None else ("POST", {"json": request})
        while time.monotonic() + pause < ends:
            time.sleep(pause)
            pause = min(max(1, 2 * pause), LONGEST_PAUSE_S)
            try:
                left = urllib3.Timeout(total=max(ends - time.monotonic(), 0.01))
                address = url.rstrip("/").removesuffix("/v1") + path
                answer = self.pool.request(method, address, timeout=left, redirect=False, **sent)
            except urllib3.exceptions.HTTPError as error:
                reason = first_line(error)
                continue
            status, text = answer.status, answer.data.decode(errors="replace")
            reason = f"it answered {status}: {text[:300]}"
            if status in (401, 403):
                advice = f"{SECTION}.token_env=VARIABLE, which holds its token"
                raise SamplerError(f"{SECTION}.url: {url}: {reason}; allowed: {advice}")
            is_cut = '"finish_reason":"abort"' in text.replace(" ", "")
            if not is_cut and (status not in AGAIN or (status == 500 and path == LOAD)):
                with suppress(ValueError):
                    return status, answer.json()
                return status, text
        raise SamplerError(
            f"{SECTION}.url: {url} gave no answer in {config.timeout_s:g} s: {reason}"
        )

    def end(self) -> None:
        """Unload the adapters from the servers, where they answer soon, and delete the folders."""
        ends = time.monotonic() + UNLOAD_S
        for name in self.written:
            for url in self.config.url:
                with suppress(SamplerError):
                    self.ask(url, UNLOAD, {"lora_name": name}, ends)
            with suppress(OSError):
                storage.delete(self.folder / name)
        if self.config.adapters is None:
            with suppress(OSError):
                self.folder.rmdir()


_samplers: list[ServerSampler] = []
"""Samplers of this process whose adapters are on servers."""
_started: list[tuple[subprocess.Popen[Any], str, int]] = []
"""Server that this process has started, with its base and the rank of its adapters."""


def release() -> None:
    """Free the servers of the adapters of this process."""
    while _samplers:
        _samplers.pop().end()


def stop() -> None:
    """End the server that this process has started, after `release`."""
    release()
    while _started:
        process, _, _ = _started.pop()
        for way, seconds in ((process.terminate, 30), (process.kill, 5)):
            way()
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def start(config: ServerConfig, base: str, dtype: torch.dtype, rank: int, longest: int) -> None:
    """Start `vllm serve`, unless this process has, for this base and adapters of this rank.

    Raises ConfigError where it cannot be started, SamplerError where it ends or never answers.
    """
    if any(kept == base and rank <= most for _, kept, most in _started):
        return
    if _started:
        stop()
    url, most = config.url[0], next((most for most in RANKS if most >= rank), RANKS[-1])
    require(not is_up(url), f"{SECTION}.start", True, f"false: a server is at {url} already")
    address = urllib3.util.parse_url(url)
    kind = str(dtype).removeprefix("torch.")
    flags = f"--host {address.host} --port {address.port} --dtype {kind} --max-model-len {longest} "
    flags += f"--enable-lora --max-lora-rank {most} --max-loras 2 --generation-config vllm "
    flags += "--logprobs-mode processed_logprobs"
    words = [config.command, "serve", base, *flags.split(), *config.arguments]
    own = (*world.INHERITED, "TORCHELASTIC_", "PYTHON")
    ours = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.token_env is not None:
        ours["VLLM_API_KEY"] = token_in(config.token_env, f"{SECTION}.token_env")
    number, log = tempfile.mkstemp(prefix="vllm-", suffix=".log")
    files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": number, "stderr": number}
    parent = os.getpid()
    files["preexec_fn"] = lambda: world.end_with(parent)
    try:  # in a session of its own, which Ctrl-C does not reach; it ends with this process
        process = subprocess.Popen(words, env=ours, start_new_session=True, **files)
    except OSError as error:
        allowed = f"the path of the executable vllm; it cannot be started: {error.strerror}"
        raise ConfigError(refusal(f"{SECTION}.command", config.command, allowed)) from error
    finally:
        os.close(number)
    _started.append((process, base, most))
    console.print_line(f"vllm serve starts at {url}; its log: {log}")
    ends = time.monotonic() + config.timeout_s
    while process.poll() is not None or not is_up(url):
        if process.poll() is not None or time.monotonic() > ends:
            status = process.poll()
            what = f"gave no answer in {config.timeout_s:g} s" if status is None else "ended"
            raise SamplerError(f"{SECTION}.command: vllm serve {what}; its log is {log}")
        time.sleep(1)


def is_up(url: str) -> bool:
    """Return whether a server answers that it is well."""
    with suppress(urllib3.exceptions.HTTPError):
        address = url.rstrip("/").removesuffix("/v1")
        return urllib3.request("GET", f"{address}/health", timeout=5.0, retries=False).status == 200
    return False
