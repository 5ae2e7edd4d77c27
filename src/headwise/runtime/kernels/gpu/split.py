"""Call the Triton kernels: split the sequence into parts, attend to all parts in parallel, and combine the results.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T all tokens, D head dim, V value dim.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.runtime.kernels.mask import Scoring, mask_strides

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 576
_LEAST_TOKENS = 128
"""The fewest tokens of a part; with fewer, combining the parts takes longer than the split saves."""
_PROGRAMS_A_PROCESSOR = 4
"""Programs to start for each of the GPU's processors, so that all stay busy."""
_NARROW = 256
"""The most numbers of a token, key and value together, that count as narrow heads; sizes of tiles depend on it."""
_FILLED = 0.96
"""The share of a program's shared memory that tiles may fill."""
ROWS = 16
"""Rows of a tile, the fewest that a GPU's matrix units support."""
LOG2_E = 1.4426950408889634
"""log2(e), because the kernels compute powers of two."""


def why_not_split(dtype: torch.dtype, device: torch.device, width: int, *, needs_grad: bool = False) -> str | None:
    """The reason why the kernel does not support such tensors, or None if it does.

    Args:
        dtype: the dtype of queries, keys and values.
        device: the device of the tensors; the CPU only with Triton's interpreter (``TRITON_INTERPRET=1``).
        width: D, the head dim.
        needs_grad: whether gradients are needed.
    """
    if not has_triton():
        return "triton is not installed"
    if device.type != "cuda" and not is_interpreted():
        return f"it is for CUDA GPUs, not {device.type}"
    if dtype not in _DTYPES:
        return f"it takes {', '.join(str(supported) for supported in _DTYPES)}, not {dtype}"
    if width > _WIDEST:
        return f"heads are {width} wide, and it takes {_WIDEST} at most"
    if needs_grad:
        return "it has no backward pass"
    return None


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, step by step on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device_of(query: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, on which Triton starts kernels."""
    return torch.cuda.device(query.device) if query.is_cuda else nullcontext()


def attend_split(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, parts: int | None = None) -> Tensor:
    """Compute `headwise.attend` by the Triton kernels.

    The tensors must be supported: `why_not_split` returns None for them.

    Args:
        query: ``[B, H, S, D]``, with any strides.
        key: ``[B, K, T, D]``; copied if the last dim is not contiguous.
        value: ``[B, K, T, V]``; copied if the last dim is not contiguous. Where it is a view of the key's first
            columns it is not read again.
        scoring: which tokens queries attend to, and the factor of their scores.
        parts: the number of parts that the sequence is split into; by the GPU's size when None.

    Returns:
        ``[B, H, S, V]``, in memory ``[B, S, H, V]``, as the output projection reads it.
    """
    query, key, value = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (query, key, value))
    B, H, S, _ = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    out = query.new_empty(B, S, H, V).transpose(1, 2)  # [B, H, S, V]
    if out.numel() == 0:
        return out
    if parts is None:
        tiles = -(-(H // K * S) // ROWS)
        # Tiles of wide heads fill the memory of a processor.
        programs = _PROGRAMS_A_PROCESSOR if query.shape[3] + V <= _NARROW else 1
        parts = part_count(B * K * tiles, T, query.device, programs=programs)
    mixtures, weights = new_parts(parts, B, H * S, V, query.device)
    with on_device_of(query):
        fill_parts((query, key, value), scoring, mixtures, weights)
        join(mixtures, weights, out)
    return out


def fill_parts(tensors: tuple[Tensor, Tensor, Tensor], scoring: Scoring, mixtures: Tensor, weights: Tensor) -> None:
    """Fill ``mixtures`` and ``weights`` by the kernel `headwise.runtime.kernels.gpu.kernels.attend_part`.

    Args:
        tensors: query, key and value.
        scoring: that of `attend_split`.
        mixtures: ``[parts, B, H·S, V]``, each part's values summed with weights 2^(score − highest score).
        weights: ``[2, parts, B, H·S]``, each part's highest score, and the sum of its weights.
    """
    import triton

    from headwise.runtime.kernels.gpu.kernels import attend_part

    (query, key, value), (mask, is_causal, scale, window) = tensors, scoring
    B, H, S, D = query.shape
    K, T, V = key.shape[1], key.shape[2], value.shape[3]
    parts, group = len(mixtures), H // K
    tiles = triton.cdiv(group * S, ROWS)
    main = max(16, 1 << (D.bit_length() - 1))  # the largest power of two in D; the rest is multiplied separately
    rest = max(16, triton.next_power_of_2(D - main)) if main < D else 0
    is_shared = value.data_ptr() == key.data_ptr() and value.stride() == key.stride() and main == V
    width = max(16, triton.next_power_of_2(V))
    tile = tile_of(main + rest + (0 if is_shared else width), query.element_size(), shared_bytes(query.device))
    sizes = {"ROWS": ROWS, "TOKENS": tile.tokens, "MAIN": main, "REST": rest, "WIDTH": width}
    flags = {"HAS_MASK": mask is not None, "CAUSAL": is_causal, "SHARED": is_shared, "NARROW": main > D}
    flags |= {"WIDEN": must_widen(query)}
    attend_part[(B * K * tiles, parts)](
        *(query, key, value, query if mask is None else mask, mixtures, weights),
        scale * LOG2_E,
        *(K, group, S, T, D, V, triton.cdiv(max(T, 1), parts), tiles),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mask_strides(mask),
        *part_strides(mixtures, weights),
        0 if window is None else window,
        **sizes,
        **flags,
        PRECISION=precision(query.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def new_parts(parts: int, batch: int, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for parts: mixtures ``[parts, B, H·S, V]``, and ``[2, parts, B, H·S]`` for highest scores and sums."""
    mixtures = torch.empty(parts, batch, rows, width, dtype=torch.float32, device=device)
    return mixtures, torch.empty(2, parts, batch, rows, dtype=torch.float32, device=device)


def must_widen(query: Tensor) -> bool:
    """Whether a kernel has to widen what it loads: Triton's interpreter would multiply the bits of bfloat16."""
    return is_interpreted() and query.dtype == torch.bfloat16


def precision(dtype: torch.dtype) -> str:
    """How matrix units multiply numbers of a dtype: float32 as three products of parts, nearly as exactly."""
    return "tf32x3" if dtype == torch.float32 and not is_interpreted() else "ieee"


def join(mixtures: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill ``out``, ``[B, H, S, V]``, from all parts by the kernel
    `headwise.runtime.kernels.gpu.kernels.join_parts`."""
    import triton

    from headwise.runtime.kernels.gpu.kernels import join_parts

    B, H, S, V = out.shape
    width = triton.next_power_of_2(V)
    join_parts[(B * H * S,)](
        *(mixtures, weights, out),
        *(H, S, V, len(mixtures)),
        *part_strides(mixtures, weights),
        *out.stride()[:3],
        PARTS=triton.next_power_of_2(max(len(mixtures), 1)),
        SOME=max(1, min(32, 4096 // width)),
        WIDTH=width,
        num_warps=4,
    )


def part_strides(mixtures: Tensor, weights: Tensor) -> tuple[int, ...]:
    """Strides of part and sequence in ``mixtures`` and in ``weights``, and the stride between its two halves."""
    return *mixtures.stride()[:2], *weights.stride()[1:3], weights.stride(0)


class Tile(NamedTuple):
    """What a program works on at a time.

    Attributes:
        tokens: the number of tokens in a tile.
        warps: the number of warps that run the program.
        stages: the number of tiles that are on their way from memory at once.
    """

    tokens: int
    warps: int
    stages: int


def tile_of(numbers: int, size: int, available: int) -> Tile:
    """The tile for heads of a width: the fastest of those tried on an H100, where two fit in shared memory.

    Args:
        numbers: how many numbers of a token are read, keys and values together.
        size: the bytes of a number.
        available: the bytes of a program's shared memory.
    """
    tokens = 64 if numbers <= 128 or (numbers > _NARROW and size < 4) else 32
    room = int(_FILLED * available)
    while tokens > ROWS and 2 * tokens * numbers * size > room:
        tokens //= 2
    return Tile(tokens, 4 if numbers <= _NARROW else 8, max(1, min(3, room // (tokens * numbers * size))))


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program on a GPU may have; as an A100's where there is none."""
    if device.type != "cuda":
        return 163 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def part_count(units: int, T: int, device: torch.device, *, programs: int = _PROGRAMS_A_PROCESSOR) -> int:
    """The number of parts that keeps the GPU busy, with at least `_LEAST_TOKENS` tokens in each part.

    Args:
        units: the number of programs that each part needs.
        T: the number of tokens.
        device: the GPU.
        programs: how many programs to start for each of the GPU's processors.
    """
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    enough = -(-programs * processors // units)
    return max(1, min(enough, T // _LEAST_TOKENS))
