"""Log-probability and entropy of tokens from hidden states, without all logits in memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Head = Callable[[Float[Tensor, "N d"]], Float[Tensor, "N V"]]
CHUNK_ELEMENTS = 16_000_000  # logits in memory at once: 64 MB in fp32, for any vocabulary
CACHED_ELEMENTS = 2**17
"""Number of logits, per thread, of which a CPU computes at a time: three tensors of 0.5 MB."""


def logprob_gap(
    ours: Float[Tensor, "B T"], theirs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[float, float]:
    """Return mean and largest difference of two log-probabilities of the same tokens, nats.

    mean_t |log p_ours(t) - log p_theirs(t)|, max_t |...|      over the real tokens of all rows
    """
    off = torch.where(mask, (ours - theirs).abs(), 0.0)
    mean, largest = torch.stack([off.sum() / mask.sum(), off.max()]).tolist()
    return mean, largest


def token_logprobs(
    hidden: Float[Tensor, "N d"],
    targets: Int[Tensor, " N"],
    head: Head,
    *,
    temperature: float,
    vocab_size: int,
    frozen_head: bool = False,
    row_multiple: int = 1,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return the log-probability of `targets[i]` and entropy of the distribution after `hidden[i]`.

        log softmax(head(hidden) / temperature)[target],   H = -sum_v p_v log p_v

    Tokens go through the head in chunks of at most CHUNK_ELEMENTS logits; where there are
    several, the backward pass computes each chunk's logits again instead of keeping them.

    frozen_head: whether log-probabilities have a gradient in `hidden` alone, and the entropy none.
        The gradient is then computed together with the logits: no logits are kept or computed
        again. The head's output is overwritten, so the head's own gradient must not need it.
    row_multiple: number to a multiple of which the rows of the head are padded with zeros.

    Returns: logprobs and entropy, fp32, nats.
    """
    if frozen_head:
        known = hidden if torch.is_grad_enabled() else hidden.detach()
        return _FrozenHead.apply(known, targets, head, temperature, vocab_size, row_multiple)  # type: ignore

    def of_chunk(h: Tensor, target: Tensor) -> Any:
        return _LogSoftmax.apply(head(h), target, temperature)

    chunks = _in_chunks(of_chunk, (hidden, targets), vocab_size, row_multiple)
    logprobs, entropy = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def vocabulary_kl(
    hidden: Float[Tensor, "N d"],
    ref_hidden: Float[Tensor, "N d"],
    head: Head,
    ref_head: Head,
    *,
    temperature: float,
    vocab_size: int,
    row_multiple: int = 1,
) -> Float[Tensor, " N"]:
    """Return the exact KL of the distribution after `hidden[i]` to the one after `ref_hidden[i]`.

        sum_v p_v (log p_v - log q_v),   p = softmax(head(hidden) / temperature), q by ref_head

    Computed in chunks like `token_logprobs`, of half as many tokens. Returns: fp32, nats.
    """

    def of_chunk(h: Tensor, ref: Tensor) -> tuple[Tensor]:
        logits = head(h), ref_head(ref)
        p, q = (torch.log_softmax(x.float() / temperature, -1) for x in logits)
        return ((p.exp() * (p - q)).sum(-1),)

    chunks = _in_chunks(of_chunk, (hidden, ref_hidden), 2 * vocab_size, row_multiple)
    return torch.cat([kl for (kl,) in chunks])


def _in_chunks(
    compute: Callable[..., tuple[Tensor, ...]],
    rows: tuple[Tensor, Tensor],
    logits_per_row: int,
    row_multiple: int,
) -> Iterator[list[Tensor]]:
    """Yield `compute` of a few rows at a time; its logits are recomputed in the backward pass."""
    size = max(1, CHUNK_ELEMENTS // logits_per_row)
    run: Callable[..., Any] = compute
    if torch.is_grad_enabled() and len(rows[0]) > size:
        run = partial(checkpoint, compute, use_reentrant=False)
    for chunk in zip(*(x.split(size) for x in rows), strict=True):
        count = len(chunk[0])
        # Rounded up to a multiple, or to the size of a chunk if that is less.
        more = min(-(-count // row_multiple) * row_multiple, size) - count
        padded = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, more)) if more else x for x in chunk]
        yield [x[:count] for x in run(*padded)]


class _LogSoftmax(torch.autograd.Function):
    """Log-probability of the targets and entropy, keeping one [N, V] tensor for their gradient.

    With p = softmax(logits / temperature) and H its entropy:

        d log p_t / d logit_v = ([v = t] - p_v) / temperature
        d H / d logit_v       = -p_v (log p_v + H) / temperature

    Autograd of the formulas keeps three such tensors and reads them a dozen times.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], temperature: float
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        shifted = logits.float() / temperature if temperature != 1 else logits.float()
        shifted = shifted - shifted.amax(-1, keepdim=True)
        odds = shifted.exp()
        log_total = odds.sum(-1).log()
        entropy = log_total - (odds * shifted).sum(-1) / log_total.exp()
        ctx.save_for_backward(shifted, log_total, entropy, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return shifted.gather(-1, targets[:, None]).squeeze(-1) - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Float[Tensor, "N V"] | None, None, None]:
        shifted, log_total, entropy, targets = ctx.saved_tensors
        logprobs = shifted - log_total[:, None]
        grad = logprobs.exp()
        if d_entropy is None:
            assert d_logprobs is not None
            grad *= -d_logprobs[:, None]
        else:
            slope = d_entropy[:, None] * (logprobs + entropy[:, None])
            grad *= -slope if d_logprobs is None else -(slope + d_logprobs[:, None])
        if d_logprobs is not None:
            grad.scatter_add_(-1, targets[:, None], d_logprobs[:, None])
        if ctx.temperature != 1:
            grad /= ctx.temperature
        return grad.to(ctx.dtype), None, None


def _settle(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N 1"],
    temperature: float,
    logprobs: Float[Tensor, " N"],
    entropy: Float[Tensor, " N"],
    *,
    learns: bool,
) -> None:
    """Fill in log-probabilities and entropy, a few rows at a time.

    On a CPU the rows are so few that all data stay in the processor's cache.
    learns: whether the logits are overwritten with p - [v = t].
    """
    on_cpu = logits.device.type == "cpu"
    elements = CACHED_ELEMENTS * torch.get_num_threads() if on_cpu else CHUNK_ELEMENTS // 4
    size = max(1, elements // logits.shape[1])
    for some, target, logprob, some_entropy in zip(
        *(x.split(size) for x in (logits, targets, logprobs, entropy)), strict=True
    ):
        scaled = some.float()
        scaled = scaled - scaled.amax(-1, keepdim=True)
        if temperature != 1:
            scaled /= temperature
        p = torch.softmax(scaled, -1)
        greatest = p.amax(-1).log()  # log-probability of the likeliest token, whose `scaled` is 0
        torch.add(scaled.gather(-1, target).squeeze(-1), greatest, out=logprob)
        torch.add(scaled.mul_(p).sum(-1), greatest, out=some_entropy).neg_()
        if learns:
            some.copy_(p.scatter_add_(-1, target, p.new_full(target.shape, -1.0)))


class _FrozenHead(torch.autograd.Function):
    """Log-probability of the targets and entropy, with the former's gradient in the forward pass.

        d log p_t / d hidden = (d head / d hidden)^T ([v = t] - p) / temperature

    A token's log-probability depends on its own hidden state only, so that the backward pass needs
    one product a token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N d"],
        targets: Int[Tensor, " N"],
        head: Head,
        temperature: float,
        vocab_size: int,
        row_multiple: int,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        learns = ctx.needs_input_grad[0]
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, gradient = torch.empty_like(logprobs), torch.empty_like(hidden)
        size = max(1, CHUNK_ELEMENTS // vocab_size)
        for h, target, logprob, h_entropy, slope in zip(
            *(x.split(size) for x in (hidden, targets[:, None], logprobs, entropy, gradient)),
            strict=True,
        ):
            count = len(h)
            more = min(-(-count // row_multiple) * row_multiple, size) - count
            with torch.set_grad_enabled(learns):
                h = F.pad(h.detach(), (0, 0, 0, more)).requires_grad_(learns)
                logits = head(h)
            edge, logits = get_gradient_edge(logits) if learns else None, logits.detach()
            _settle(logits[:count], target, temperature, logprob, h_entropy, learns=learns)
            if edge is not None:
                (found,) = torch.autograd.grad(edge, h, logits)
                torch.mul(found[:count], -1 / temperature, out=slope)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_logprobs: Float[Tensor, " N"], d_entropy: Tensor
    ) -> tuple[Float[Tensor, "N d"], None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * d_logprobs[:, None]).to(gradient.dtype), None, None, None, None, None
