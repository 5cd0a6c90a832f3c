"""What answers of a server of vLLM mean: whether it fits a run, and the response that it gives."""

from contextlib import suppress
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lightning_rlhf.core.errors import ConfigError, SamplerError, require

SECTION = "rollout_server"
"""Section of the configuration that describes the servers."""
ENABLE = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
Answer = tuple[int, Any]
"""Status of an answer, with its JSON or text."""


def base_of(models: Answer, tokens: int) -> str:
    """Return the name of the base model that a server serves.

    models: answer to GET /v1/models; tokens: number of tokens of the longest prompt and response.
    Raises ConfigError where it serves none, or none for texts of this length.
    """
    status, found = models
    data = found.get("data") if isinstance(found, dict) else None
    bases = [one for one in data or () if one.get("parent") is None]
    holds, shown = status == 200 and bool(bases), str(found)[:300]
    require(holds, f"what {SECTION}.url serves", shown, "a model, by vLLM")
    limit = bases[0].get("max_model_len")
    allowed = f"at least {tokens}, the longest prompt and response: --max-model-len {tokens}"
    require(limit is None or limit >= tokens, "max_model_len of the server", limit, allowed)
    return str(bases[0]["id"])


def check_answers(
    loaded: Answer, probe: Answer, logits: Float[Tensor, " V"], *, temperature: float, gap: float
) -> None:
    """Raise ConfigError unless a server serves the run's model with its adapter.

    Args:
        loaded: answer to the request to load an adapter.
        probe: answer to the request for the token after the probe, if the adapter was loaded.
        logits: logits of that token here.
        temperature: the one at which it was sampled; 0 for the likeliest token.
        gap: largest mean difference of log-probabilities, nats; one token's may be ten times it.
    """
    status, found = loaded
    if status != 200:
        text, advice = str(found)[:300], ENABLE
        if "max_lora_rank" in text:
            advice = "start the server with a larger --max-lora-rank"
        elif "adapter" in text:
            advice = f"{SECTION}.adapters=FOLDER with a folder that the server sees by this path"
        message = f"{SECTION}.url: the server answered {status} to loading an adapter: {text}"
        raise ConfigError(f"{message}; allowed: {advice}")
    status, found = probe
    size = f"that of a model with a vocabulary of {len(logits)} tokens, as the run has"
    require(status == 200, "the server's answer to the probe", str(found)[:300], size)
    (token,), (value,), _ = choice_of(found, 1, len(logits))
    heat = temperature or 1.0  # vLLM tells the probability at 1 of a token that it does not draw
    here, raw = (float((logits / t).log_softmax(-1)[token]) for t in (heat, 1.0))
    off, off_raw = abs(value - here), abs(value - raw)
    shown = f"{SECTION}.url: the server's log-probability of a token is {value:.4g}"
    if off > gap / 10 and off_raw < off / 10:
        mode = "start the server with --logprobs-mode processed_logprobs"
        raise ConfigError(f"{shown}, that before the temperature; allowed: {mode}")
    if not (off <= gap or off <= min(off_raw, 10 * gap)):
        raise ConfigError(
            f"{shown}, here it is {here:.4g}, further apart than {SECTION}.max_gap={gap:g} allows; "
            "allowed: a server of the same base weights, those of the SFT model"
        )


def choice_of(found: Any, most: int, vocabulary: int) -> tuple[list[int], list[float], bool]:
    """Return the tokens of the only response of an answer, their log-probabilities, and its end.

    most: largest number of tokens; vocabulary: number of token ids. The end is True where the
    response has ended. Raises SamplerError for an answer of any other form.
    """
    with suppress(KeyError, TypeError, ValueError):
        (choice,) = found["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        is_token = all(isinstance(one, int) and 0 <= one < vocabulary for one in ids)
        is_logprob = all(isinstance(one, float | int) and one < 1e-3 for one in logprobs)
        is_end = choice["finish_reason"] == "stop"
        is_whole = is_end or (choice["finish_reason"] == "length" and len(ids) == most)
        if 0 < len(ids) == len(logprobs) <= most and is_token and is_logprob and is_whole:
            return ids, logprobs, is_end
    raise SamplerError(
        f"{SECTION}.url: the server answered {str(found)[:300]}; allowed: one choice with 1 to "
        f"{most} token_ids, as many token_logprobs, and an end by stop or length"
    )
