"""Claims about the scores that the softmax is taken of: C24."""

from __future__ import annotations

from headwise.study.audit.claim import Check, Claim, rounded_number

_SAMPLES = 200_000


def dot_product_variance(width: int, *, is_scaled: bool) -> float:
    """The variance of q·k of random vectors whose numbers have variance 1, over sqrt(d) where it is scaled."""
    return score_variance(width, width**0.5 if is_scaled else 1)


def score_variance(width: int, scale: float) -> float:
    """The variance of q·k over a scale, of random vectors whose numbers have variance 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(_SAMPLES, width, generator=generator) for _ in range(2))
    return float(((query * key).sum(-1) / scale).var())


CLAIMS = (
    Claim(
        id="C24",
        guide="G5",
        says="the variance of q·k is d, and 1 after scaling",
        how=f"{_SAMPLES:,} random vectors",
        checks=(
            *(
                Check(
                    states=f"the variance at d = {width}",
                    printed=rounded_number(str(width), slack=0.02),
                    measure=dot_product_variance,
                    inputs={"width": width, "is_scaled": False},
                )
                for width in (16, 64)
            ),
            Check(
                states="the variance after scaling, d = 64",
                printed=rounded_number("1.00", slack=0.02),
                measure=dot_product_variance,
                inputs={"width": 64, "is_scaled": True},
            ),
        ),
    ),
)
