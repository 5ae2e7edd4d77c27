"""Time the decoding kernel for GPUs with every tile it could use, beside torch's SDPA and the time of reading alone.

    python -m benchmarks.tiles          # on a machine with a CUDA GPU; kept in benchmarks/results/tiles-cuda.json

One new token, one sequence, caches that are read in turn from the GPU's memory; calls are replayed from a CUDA graph.
`headwise.runtime.kernels.gpu.split.tile_of` chooses among these tiles.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from benchmarks.kept import Kept, say
from torch import Tensor

from headwise.measure.timing.machine import Probes
from headwise.measure.timing.timing import record_graph, time_call
from headwise.runtime.kernels import attend
from headwise.runtime.kernels.gpu import attend_split, split
from headwise.runtime.kernels.mask import Scoring

SHAPES = ("32/8/128", "9/3/64", "16/512+64")
LENGTHS = (4096, 32768)
DTYPES = ("bfloat16", "float32")
NARROW, WIDE = ((32, 64, 128), (4, 8), (2, 3, 4)), ((16, 32, 64), (4, 8), (1, 2, 3))
"""Tokens, warps and stages that are tried, of heads and of latents."""
LEAST = (64, 128, 256)
"""The fewest tokens of a part that are tried."""
BETWEEN = 192 << 20
"""Bytes of caches that are read in turn."""


def sizes(shape: str) -> tuple[int, int, int, int]:
    """Query heads, key–value heads, and the widths of a key and of a value."""
    if "+" in shape:
        heads, widths = shape.split("/")
        rank, rope = map(int, widths.split("+"))
        return int(heads), 1, rank + rope, rank
    H, K, D = map(int, shape.split("/"))
    return H, K, D, D


def tiles(shape: str) -> list[split.Tile]:
    """The tiles that are tried."""
    return [split.Tile(*tile) for tile in itertools.product(*(WIDE if "+" in shape else NARROW))]


def tensors(shape: str, dtype: torch.dtype, T: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]], int]:
    """A query, caches, and the bytes of one."""
    H, K, D, V = sizes(shape)
    query = torch.randn(1, H, 1, D, device="cuda").to(dtype)
    nbytes = K * T * (D if D != V else 2 * D) * dtype.itemsize
    caches = []
    for _ in range(max(1, min(24, BETWEEN // nbytes))):
        key = torch.randn(1, K, T, D, device="cuda").to(dtype)
        caches.append((key, key[..., :V] if D != V else torch.randn_like(key)))
    return query, caches, nbytes


def with_tile(tile: split.Tile, least: int) -> Callable[..., Tensor]:
    """The kernel with a tile."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with mock.patch.multiple(split, tile_of=lambda *_: tile, _LEAST_TOKENS=least):
            return attend_split(query, key, value, Scoring(None, True, query.shape[3] ** -0.5))

    return call


def compiled(job: tuple[str, str, split.Tile]) -> None:
    """Compile the kernel of a tile, for the other processes to find."""
    shape, dtype, tile = job
    query, caches, _ = tensors(shape, getattr(torch, dtype), 1024)
    try:
        with_tile(tile, 256)(query, *caches[0])
    except RuntimeError as error:  # more memory than a program has
        say(job, str(error).splitlines()[0])


def milliseconds(call: Callable[..., Tensor], query: Tensor, caches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The median time of one call."""
    following = itertools.cycle(caches)
    replay = record_graph(lambda: call(query, *next(following)), len(caches))
    replay()
    return median(time_call(replay) for _ in range(5)) / len(caches) * 1e3


def measure(shape: str, dtype: torch.dtype, T: int) -> dict[str, Any]:
    """Time all ways to attend to one cache."""
    query, caches, nbytes = tensors(shape, dtype, T)
    found = []
    for tile, least in itertools.product(tiles(shape), LEAST):
        try:
            found.append((milliseconds(with_tile(tile, least), query, caches), [*tile, least]))
        except RuntimeError:
            continue
    probe = Probes(dtype, "cuda")
    read = median(time_call(probe.calls()["read"]) for _ in range(5))
    row = {
        "limit_ms": nbytes / probe.limits(read, 1.0).bytes_per_second * 1e3,
        "packed_ms": milliseconds(partial(attend, backend="packed"), query, caches),
        "tiles": sorted(found)[:6],
    }
    if "+" not in shape:
        row["sdpa_ms"] = milliseconds(partial(F.scaled_dot_product_attention, enable_gqa=True), query, caches)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/tiles-cuda.json"))
    parser.add_argument("--processes", type=int, default=8, help="that compile side by side")
    options = parser.parse_args(arguments)
    kept = Kept(options.json, {"lengths": list(LENGTHS)})
    spawn = multiprocessing.get_context("spawn")
    jobs = [(shape, dtype, tile) for shape in SHAPES for dtype in DTYPES for tile in tiles(shape)]
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        list(pool.map(compiled, jobs))
    for shape, dtype, T in itertools.product(SHAPES, DTYPES, LENGTHS):
        name = f"{shape} × {T} {dtype}"
        if name not in kept.rows:
            kept.add(name, measure(shape, getattr(torch, dtype), T))
        say(name, kept.rows[name]["limit_ms"], kept.rows[name]["tiles"][0])


if __name__ == "__main__":
    main()
