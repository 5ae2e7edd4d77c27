"""Claims about code that the guides print: C26. Its computations are written here anew, from their description."""

from __future__ import annotations

from headwise.study.audit.claim import Check, Claim, UntestableError, rounded_number
from headwise.study.audit.claims.caches import percent_smaller
from headwise.study.audit.claims.softmax import score_variance


def can_be_computed(hidden_size: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether GQA whose keys and values have heads of width E/k can be computed."""
    import torch

    width = hidden_size // num_kv_heads
    query = torch.zeros(1, num_heads, 4, hidden_size // num_heads)
    key = torch.zeros(1, num_kv_heads, 4, width).repeat_interleave(num_heads // num_kv_heads, dim=1)
    try:
        query @ key.mT
    except RuntimeError:
        return False
    return True


def scaled_variance(up: int, heads: int, rope: int, hidden_size: int, *, as_printed: bool) -> float:
    """The variance of MLA's scores of random vectors, divided by the code's scale or by the text's."""
    width = up // heads + rope
    return score_variance(width, (hidden_size / heads) ** 0.5 + rope**0.5 if as_printed else width**0.5)


def rotated_scores_differ(dim: int, distance: int, *, with_checkpoint: bool) -> float:
    """The relative difference of scores where sine and cosine are swapped in RoPE.

    Args:
        dim: the width of the head.
        distance: the distance from the key to the query, in tokens.
        with_checkpoint: whether to compare the right and the swapped rotation of the same vectors; otherwise the
            swapped rotation is compared with itself ten tokens later, which says whether it depends on distances
            alone.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1000, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def rotated(states: torch.Tensor, position: int, *, is_swapped: bool) -> torch.Tensor:
        cos, sin = torch.cos(position * frequencies), torch.sin(position * frequencies)
        if is_swapped:
            cos, sin = sin, cos
        one, two = states[:, ::2], states[:, 1::2]
        return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)

    def scores(begin: int, *, is_swapped: bool) -> torch.Tensor:
        queries = rotated(query, begin + distance, is_swapped=is_swapped)
        return (queries * rotated(key, begin, is_swapped=is_swapped)).sum(-1)

    first = scores(0, is_swapped=not with_checkpoint)
    return float((scores(10, is_swapped=True) - first).norm() / first.norm())


def missing_names() -> bool:
    """Whether names in the guides' code exist, which cannot be tested: that code is not part of this project.

    Raises:
        UntestableError: always.
    """
    raise UntestableError("the guides' code is not part of this project")


def caches_are_equal(hidden_size: int, num_heads: int, four: int) -> bool:
    """Whether GQA of ``four`` key–value heads, and of groups of ``four`` query heads, cache as much."""
    by_heads, by_group = (
        percent_smaller(f"GQA-{heads}", hidden_size, num_heads) for heads in (four, max(num_heads // four, 1))
    )
    return by_heads == by_group


_MLA = {"up": 128, "heads": 8, "rope": 26, "hidden_size": 256}

CLAIMS = (
    Claim(
        id="C26",
        guide="G2 – G5",
        says="the printed code: GQA with heads of width E/k for keys and values; MLA over sqrt(E/h) + sqrt(r) "
        "where the text says sqrt(U/h + r); RoPE with sine and cosine swapped; GQA-4 as four heads or groups "
        "of four; unknown names",
        how="the same computations, on random vectors",
        checks=(
            *(
                Check(
                    states="GQA with heads of width E/k runs",
                    when=f"k = {heads} of 8",
                    printed=True,
                    measure=can_be_computed,
                    inputs={"hidden_size": 64, "num_heads": 8, "num_kv_heads": heads},
                )
                for heads in (8, 4, 2)
            ),
            *(
                Check(
                    states="the variance of MLA's scores",
                    when=when,
                    printed=rounded_number("1.00", slack=0.02),
                    measure=scaled_variance,
                    inputs={**_MLA, "as_printed": as_printed},
                )
                for as_printed, when in ((True, "with the code's scale"), (False, "with the text's scale"))
            ),
            *(
                Check(
                    states="the difference that swapping makes to scores",
                    when=when,
                    printed=rounded_number("0.00"),
                    measure=rotated_scores_differ,
                    inputs={"dim": 64, "distance": 7, "with_checkpoint": with_checkpoint},
                )
                for with_checkpoint, when in (
                    (False, "a model trained with it: distances alone still count"),
                    (True, "a checkpoint trained without it"),
                )
            ),
            Check(
                states="GQA-4 caches the same by both readings",
                when="h = 8",
                printed=True,
                measure=caches_are_equal,
                inputs={"hidden_size": 512, "num_heads": 8, "four": 4},
            ),
            Check(
                states="GQA-4 caches the same by both readings",
                when="h = 16",
                printed=True,
                measure=caches_are_equal,
                inputs={"hidden_size": 512, "num_heads": 16, "four": 4},
            ),
            Check(states="the names in G3's and G5's code exist", printed=False, measure=missing_names),
        ),
    ),
)
