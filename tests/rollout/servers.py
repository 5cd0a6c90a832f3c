"""A stand-in for a server of vLLM: its routes, over HFSampler and adapters read from folders."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from lightning_rlhf.core.records import Prompts
from lightning_rlhf.models.config import BASE
from lightning_rlhf.models.roles import Roles
from lightning_rlhf.rollout.sampler import HFSampler, SamplingParams
from lightning_rlhf.rollout.score import predict


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "base", "parent": None, "max_model_len": 200}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.fault == "slow" and "completions" in self.path:
            time.sleep(1.5)
        with self.server.lock:
            self.answer(*self.server.answers(self.path, request))

    def answer(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    log_message = lambda *_: None  # noqa: E731


class StandIn(ThreadingHTTPServer):
    """Serves a base and the adapters that it has loaded, with one fault on demand."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, roles: Roles) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.roles, self.lock, self.fault = roles, threading.Lock(), ""
        self.url, self.loaded = f"http://127.0.0.1:{self.server_port}", {"base": BASE}

    def answers(self, route: str, request: dict[str, Any]) -> tuple[int, Any]:
        name, fault = request.get("lora_name", ""), self.fault
        if "unload" in route:
            return (200, "removed") if self.loaded.pop(name, None) else (404, "not found")
        if "load" in route:
            role = [*self.loaded.values()][-1]
            if name in self.loaded:
                return 400, f"The lora adapter '{name}' has already been loaded."
            if fault != "stale":
                role = f"{name}-{time.monotonic_ns()}"
                self.roles.load_adapter(role, Path(request["lora_path"]), trainable=False)
            self.loaded[name] = role
            return 200, "added"
        if fault in ("restart", "busy", "abort"):  # and well from then on
            self.fault, self.loaded = "", {"base": BASE} if fault == "restart" else self.loaded
        self.stop = request["stop"]
        if fault in ("busy", "400"):
            return 503 if fault == "busy" else 400, "max_tokens is too large"
        if request["model"] not in self.loaded:
            return 404, f"The model {request['model']} does not exist."
        cut = {"finish_reason": "abort"} if fault == "abort" else {}
        return 200, {"choices": [self.complete(request) | cut]}

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens, heat = torch.tensor([request["prompt"]]), request["temperature"] or 1e-6
        limits = {"max_response_tokens": request["max_tokens"], "temperature": heat}
        params = SamplingParams(end_token_ids=request["stop_token_ids"], **limits)
        generator = torch.Generator().manual_seed(request["seed"])
        prompts = Prompts(tokens=tokens, mask=tokens >= 0, index=torch.zeros(1, dtype=torch.long))
        with self.roles.use_role(self.loaded[request["model"]]):
            found = HFSampler(self.roles, params).sample(prompts, 1, generator, torch.arange(1))
            divisor = 1.0 if self.fault == "raw" or not request["temperature"] else heat
            logprobs, _ = predict(found, self.roles, None, divisor, 1)
        return {
            "token_ids": found.responses[0].tolist(),
            "logprobs": {"token_logprobs": logprobs[0].tolist()[self.fault == "counts" :]},
            "finish_reason": "stop" if found.ended[0] else "length",
        }


@contextmanager
def serving(roles: Roles) -> Iterator[StandIn]:
    """A server that answers inside the block."""
    with StandIn(roles) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
