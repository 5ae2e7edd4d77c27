"""What a conversion gains and costs at a user's context: bytes of cache and of weights, and a decode step's work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headwise.costs.prediction import Pass, operators
from headwise.errors import HeadwiseError
from headwise.models.specs import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Balance:
    """A model before and after its conversion, with a cache of so many tokens; what is not in codes has 16 bits.

    Attributes:
        context: tokens of all sequences together.
        cache_bytes: of these tokens, before and after.
        weight_bytes: of the files of weights, before and after.
        flops: of a decode step of one sequence of these tokens, after over before; None where it is not known.
        bytes_read: by that step, weights and cache in 16 bits or in codes, likewise.
    """

    context: int
    cache_bytes: tuple[float, float]
    weight_bytes: tuple[int, int]
    flops: float | None = None
    bytes_read: float | None = None

    @property
    def saved(self) -> float:
        """Bytes of cache and weights together that are saved; negative where more are taken."""
        return sum(self.cache_bytes[:1] + self.weight_bytes[:1]) - self.cache_bytes[1] - self.weight_bytes[1]

    @property
    def even_at(self) -> int | None:
        """The tokens from which on memory is saved; None where it never is, and 0 where it always is."""
        by_token = (self.cache_bytes[0] - self.cache_bytes[1]) / self.context
        grown = self.weight_bytes[1] - self.weight_bytes[0]
        if by_token <= 0:
            return None
        return max(math.ceil(grown / by_token), 0)


def balance(
    before: ModelSpec,
    after: ModelSpec,
    *,
    context: int,
    token_bytes: tuple[float, float],
    weight_bytes: tuple[int, int],
) -> Balance | None:
    """Weigh a conversion.

    Args:
        before: the source.
        after: the result.
        context: tokens of all sequences together.
        token_bytes: of a token in the caches of both, as they are served.
        weight_bytes: of the files of weights of both.

    Returns:
        The balance; None where the source caches nothing.
    """
    if not token_bytes[0]:
        return None
    found = Balance(
        context=context,
        cache_bytes=(context * token_bytes[0], context * token_bytes[1]),
        weight_bytes=weight_bytes,
    )
    try:
        (flops, read), (later_flops, later_read) = (
            _step(model, context, each) for model, each in zip((before, after), token_bytes, strict=True)
        )
    except HeadwiseError:  # layers whose costs are not known
        return found
    return replace(found, flops=later_flops / flops, bytes_read=later_read / read)


def _step(model: ModelSpec, context: int, token_bytes: float) -> tuple[float, float]:
    """FLOPs of a decode step, and the bytes that it reads."""
    step = Pass(total=context)
    found = operators(replace(model, stored=None), step)
    weights = sum(each.times * each.weight_bytes for each in found)
    return sum(each.times * each.flops for each in found), weights + context * token_bytes
