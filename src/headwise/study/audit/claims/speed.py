"""Claims about time: C9, C10 and C17. They are measured here, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from headwise import cost
from headwise.study.audit.claim import Check, Claim, at_least, exact_number, rounded_number
from headwise.study.audit.layers import grouped_layer

if TYPE_CHECKING:
    from headwise.study.audit.mechanisms import MechanismBench

SLACK = 0.1
"""The relative difference that is allowed between two measurements of the same time."""

LENGTHS = (128, 256, 512, 1024)

SPEEDUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "MQA": ("1.45", "1.98", "2.09", "1.93"),
        "GQA-4": ("1.18", "1.50", "1.43", "1.43"),
        "latent-256": ("1.12", "1.34", "1.19", "1.26"),
    }
)
MILLISECONDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "MHA": (".45", "1.23", "4.56", "17.83"),
        "MQA": (".31", ".62", "2.18", "9.23"),
        "GQA-4": (".38", ".82", "3.18", "12.45"),
        "latent-256": (".40", ".92", "3.82", "14.12"),
    }
)
"""The milliseconds that the guide prints, for each of `LENGTHS`."""


@cache
def run_benchmark(hidden_size: int, num_heads: int) -> MechanismBench:
    """The benchmark that the guide describes, run once for all claims that read it."""
    from headwise.study.audit.mechanisms import bench_mechanisms

    return bench_mechanisms(hidden_size=hidden_size, num_heads=num_heads, lengths=LENGTHS)


def speedup(mechanism: str, length: int, hidden_size: int, num_heads: int) -> float:
    """MHA's time of one forward pass over a mechanism's."""
    return run_benchmark(hidden_size, num_heads).row(mechanism, length).speedup


def milliseconds(mechanism: str, length: int, hidden_size: int, num_heads: int) -> float:
    """The median time of one forward pass."""
    return run_benchmark(hidden_size, num_heads).row(mechanism, length).ms


def speedup_growth(mechanism: str, hidden_size: int, num_heads: int) -> float:
    """The speed-up at the greatest length over that at the least."""
    ends = (speedup(mechanism, length, hidden_size, num_heads) for length in (LENGTHS[-1], LENGTHS[0]))
    return next(ends) / next(ends)


def flops_of_heads(length: int, hidden_size: int, num_heads: int) -> float:
    """FLOPs of MHA over those of one head of its full width."""
    many, one = (cost.forward_flops(grouped_layer(hidden_size, heads, heads), length) for heads in (num_heads, 1))
    return many / one


@cache
def time_of_one_head(length: int, hidden_size: int, num_heads: int) -> float:
    """The time of one head of the full width over that of MHA."""
    import torch

    from headwise.measure.timing.timing import time_interleaved
    from headwise.runtime.attention import build

    with torch.inference_mode():
        states = torch.randn(1, length, hidden_size)
        calls: dict[str, Callable[[], object]] = {}
        for name, heads in (("many", num_heads), ("one", 1)):
            layer = build(grouped_layer(hidden_size, heads, heads)).eval()
            calls[name] = partial(layer, states, is_causal=True)
        times = time_interleaved(calls, repeats=30, warmup=5)
    return times["one"] / times["many"]


GUIDE_SIZES: Mapping[str, int] = MappingProxyType({"hidden_size": 512, "num_heads": 8})


def _speedup(mechanism: str, printed: str, length: int = 1024, where: str = "") -> Check:
    return Check(
        states=f"{mechanism}'s speed-up at {length}{where}",
        printed=rounded_number(printed, suffix=" ×", slack=SLACK),
        measure=speedup,
        inputs={"mechanism": mechanism, "length": length, **GUIDE_SIZES},
        unit="×",
    )


CLAIMS = (
    Claim(
        id="C9",
        guide="G2",
        says="at 1024 tokens MQA is 1.8 × as fast as MHA, GQA-2 1.4, GQA-4 1.2, latent 1.3; other tables print "
        "others; the speed-up grows with the length",
        how=f"causal forward passes at E = 512, h = 8, float32, on this machine; within {SLACK:.0%}",
        checks=(
            *(_speedup(name, printed) for name, printed in (("MQA", "1.8"), ("GQA-2", "1.4"), ("GQA-4", "1.2"))),
            _speedup("latent-256", "1.3"),
            _speedup("MQA", "1.6", where=" (GQA-1)"),
            *(
                _speedup(name, printed, length, " in the table")
                for name, row in SPEEDUPS.items()
                for length, printed in zip(LENGTHS, row, strict=True)
            ),
            *(
                Check(
                    states=f"{name}'s speed-up at 1024 over that at 128",
                    printed=at_least(1, " ×"),
                    measure=speedup_growth,
                    inputs={"mechanism": name, **GUIDE_SIZES},
                    unit="×",
                )
                for name in SPEEDUPS
            ),
        ),
    ),
    Claim(
        id="C10",
        guide="G2",
        says="one forward pass takes MHA 0.45 to 17.83 ms from 128 to 1024 tokens, MQA 0.31 to 9.23 ms",
        how=f"causal forward passes at E = 512, h = 8, float32, on this machine; within {SLACK:.0%}",
        checks=tuple(
            Check(
                states=f"{name} at {length}",
                printed=rounded_number(printed, suffix=" ms", slack=SLACK),
                measure=milliseconds,
                inputs={"mechanism": name, "length": length, **GUIDE_SIZES},
                unit="ms",
            )
            for name, row in MILLISECONDS.items()
            for length, printed in zip(LENGTHS, row, strict=True)
        ),
    ),
    Claim(
        id="C17",
        guide="G3, G5",
        says="MHA costs the FLOPs of one head of full width (G3); several small heads run faster than one (G5)",
        how="closed forms, and causal forward passes on this machine",
        checks=(
            Check(
                states="MHA's FLOPs over those of one head",
                printed=exact_number(1),
                measure=flops_of_heads,
                inputs={"length": 512, **GUIDE_SIZES},
            ),
            *(
                Check(
                    states="the time of one head over that of eight",
                    when=f"{length} tokens",
                    printed=at_least(1, " ×"),
                    measure=time_of_one_head,
                    inputs={"length": length, **GUIDE_SIZES},
                    unit="×",
                )
                for length in (128, 1024)
            ),
        ),
    ),
)
