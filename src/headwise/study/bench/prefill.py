"""Prefill: causal attention over a prompt, computed in several ways and limited by matrix products.

Shapes: B batch, H query heads, K key–value heads, S = T tokens of the prompt, D head dim, V value dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError
from headwise.measure.timing.machine import Probes
from headwise.models.checkpoints import dtype_name
from headwise.runtime.hf import as_device, as_dtype
from headwise.runtime.kernels import choose_backend
from headwise.study.bench.decode import (
    DTYPES,
    Shape,
    check_fits,
    check_sizes,
    expanded,
    short_name,
    ways_to_attend,
    without_repetitions,
)
from headwise.study.bench.report import OURS, Bench, UnableError, Way, run_case

LENGTHS = (512, 2048, 8192)
SHAPES = tuple(Shape.parse(text) for text in ("9/3/64", "32/32/128", "32/8/128", "32/1/128"))
MOST_SCORES = 2**31
"""The most bytes of scores for which a way that stores all of them is timed."""


@torch.inference_mode()
def bench_prefill(
    *,
    shapes: Sequence[Shape] | None = None,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    device: str = "cpu",
    quick: bool = False,
    progress: Progress = silent,
) -> Bench:
    """Time causal attention over a whole prompt, over a grid of sizes.

    For example ``bench_prefill(lengths=[512], quick=True).to_dict()``.

    Args:
        shapes: the numbers of heads and their widths; `SHAPES` when None.
        lengths: the numbers of tokens in the prompt; `LENGTHS` when None.
        dtypes: the dtypes of queries, keys and values; `DTYPES` when None.
        device: the device to run on, ``cpu`` or ``cuda``.
        quick: whether to time a smaller grid, without ways that have to be compiled.
        progress: the callback that reports each case.

    Raises:
        ArgumentError: a size is not positive or does not fit in memory, a dtype is not known, there is no such
            device, or a shape is that of absorbed MLA, which reads no prompts.
    """
    shapes = without_repetitions(shapes or (SHAPES[::2] if quick else SHAPES))
    lengths = without_repetitions(lengths or ((512, 1024) if quick else LENGTHS))
    kinds = without_repetitions(as_dtype(text) for text in dtypes or DTYPES)
    check_sizes(length=lengths)
    as_device(device)
    for shape in shapes:
        if shape.is_latent:
            raise ArgumentError("shape", str(shape), "must be HEADS/KV_HEADS/HEAD_DIM: prompts are read expanded")
    grid = list(itertools.product(kinds, shapes, lengths))
    for dtype, shape, T in grid:
        check_fits(shape, 2 * (shape.H + shape.K) * T * shape.D * dtype.itemsize, device, length=T)
    cases, probes = [], {dtype: Probes(dtype, device) for dtype in kinds}
    for index, (dtype, shape, T) in enumerate(grid):
        progress("prefilling", index, len(grid))
        query, key, value = (
            torch.randn(1, heads, T, shape.D, device=device).to(dtype) for heads in (shape.H, shape.K, shape.K)
        )
        ways = ways_to_attend(query, [(key, value)], with_compiled=not quick, is_causal=True)
        if shape.H != shape.K:
            ways["SDPA, copies"] = partial(_sdpa_of_copies, query, key, value)
        ways["expanded"] = partial(_within_memory, shape.H * T * T * 4, partial(expanded, query, key, value, True))
        del ways["packed"]  # made for few tokens: it stores all scores
        chosen = choose_backend(query.shape, key.shape, dtype=dtype, device=device)
        cases.append(
            run_case(
                f"{shape} × {T:,} {short_name(dtype)}",
                {"shape": str(shape), "length": T, "batch": 1, "dtype": dtype_name(dtype)},
                ways,
                nbytes=2 * query.nbytes + key.nbytes + value.nbytes,
                flops=shape.flops(1, T, T) // 2,
                probes=probes[dtype],
                budget=1.5 if quick else 6.0,
                notes={OURS: chosen.backend},
            )
        )
        torch._dynamo.reset()
    progress("prefilling", len(grid), len(grid))
    return Bench("prefill", cases, device)


def _sdpa_of_copies(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Way:
    """torch's SDPA on keys and values copied for every query head, as transformers calls it with a mask."""
    group = query.shape[1] // key.shape[1]

    def call() -> torch.Tensor:
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True)

    return call


def _within_memory(scores: int, call: Callable[[], object]) -> Way:
    if scores > MOST_SCORES:
        raise UnableError(f"would hold {scores / 2**30:.0f} GiB of scores")
    return call
