"""Positions of real tokens, and sums, means and whitening over them alone."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def by_length(mask: Bool[Tensor, "B S"]) -> Int[Tensor, " B"]:
    """Return the row numbers from the shortest to the longest row, to save padding."""
    return mask.sum(dim=1).argsort(stable=True)


def real_tokens(tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> list[list[int]]:
    """Return the tokens of each row where the mask is True."""
    rows = zip(tokens.tolist(), mask.tolist(), strict=True)
    return [[t for t, real in zip(row, keep, strict=True) if real] for row, keep in rows]


def picker(mask: Bool[Tensor, "*n"]) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the elements of a tensor where `mask` is True, row by row.

    The elements may have further dimensions. A mask on the CPU picks elements of another device
    without waiting for that device, which must say how many there are where the mask is its own.
    """
    uploaded: dict[torch.device, Tensor] = {}

    def pick(x: Tensor) -> Tensor:
        if x.device == mask.device:
            return x[mask]
        if x.device not in uploaded:
            uploaded[x.device] = upload(mask.flatten().nonzero().squeeze(1), x.device)
        return x.flatten(0, mask.ndim - 1).index_select(0, uploaded[x.device])

    return pick


def placed(x: Float[Tensor, " N"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `x` where `mask` is True, row by row, and 0 elsewhere: the inverse of `picker`.

    Neither it nor its gradient waits for a device where the mask is on the CPU.
    """
    index = upload(mask.flatten().nonzero().squeeze(1), x.device)
    whole = x.new_zeros(mask.numel())
    return whole.index_copy(0, index, x).view(mask.shape)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`; one of the CPU, without waiting for what the device computes."""
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def from_first_real(
    tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], longest: int | None = None
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return the rows without their left padding, cut to the longest, and their mask.

    The real tokens of each row must be contiguous. The mask is on the device of `mask`.
    longest: number of tokens of the longest row; None asks the device.
    """
    lengths, first = mask.sum(dim=1), mask.int().argmax(dim=1)
    longest = int(lengths.max()) if longest is None else longest
    position = torch.arange(longest, device=mask.device)
    column = (first[:, None] + position).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, upload(column, tokens.device)), position < lengths[:, None]


def masked_sum(x: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Return the sum of `x` where `mask` is True. Other elements, even NaN, have no effect."""
    return torch.where(mask, x, 0).sum()


def masked_moments(
    x: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the mean and population variance of the real elements.

    The population variance divides by the count, not by the count minus one, so that appending a
    copy of the batch changes nothing. The mean is corrected once by the mean of the residuals, so
    that equal numbers have variance 0, however large they are.
    """
    x = torch.where(mask, x, 0)
    count = mask.sum()
    mean = x.sum() / count
    mean = mean + masked_sum(x - mean, mask) / count
    return mean, masked_sum((x - mean) ** 2, mask) / count


def masked_whiten(x: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Shift and scale the real elements of `x` to mean 0 and variance 1.

        (x - mean) / sqrt(var + 1e-8)

    Mean and variance are those of `masked_moments`. Returns 0 on padding.
    """
    mean, variance = masked_moments(x, mask)
    return torch.where(mask, (torch.where(mask, x, 0) - mean) * torch.rsqrt(variance + 1e-8), 0)


def masked_rescale(x: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Scale the real elements of `x` about their mean to variance 1; the mean stays.

        (x - mean) / sqrt(var + 1e-8) + mean

    Returns 0 on padding. Source: Huang et al. 2024, detail 24, https://arxiv.org/abs/2403.17031
    """
    mean, _ = masked_moments(x, mask)
    return torch.where(mask, masked_whiten(x, mask) + mean, 0)
