"""Decoding: attention of one new token, or a few, to a cache, computed in several ways and limited by bandwidth.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T tokens in the cache, D head dim, V value dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError
from headwise.measure.timing.machine import Probes, available_bytes
from headwise.models.checkpoints import dtype_name
from headwise.runtime.hf import as_device, as_dtype
from headwise.runtime.kernels import attend, causal_mask, choose_backend
from headwise.runtime.kernels.sdpa import causal_block_mask
from headwise.study.bench.report import BETWEEN, OURS, Bench, Case, UnableError, Way, run_case

_Any = TypeVar("_Any")

LENGTHS = (512, 2048, 8192, 32768)
BATCHES = (1, 4)
DTYPES = ("float32", "bfloat16")
_MOST = 2**31 - 1
"""The largest size: beyond it torch's counts of numbers could overflow."""


def check_sizes(**sizes: Sequence[int]) -> None:
    """Refuse sizes that are not positive, or too large to be any.

    Args:
        sizes: the values to check, by the name that an error gives them.

    Raises:
        ArgumentError: a value is outside the range.
    """
    for name, values in sizes.items():
        for value in values:
            if not 1 <= value <= _MOST:
                raise ArgumentError(name, value, f"must be at least 1, and at most {_MOST}")


def check_fits(shape: Shape, nbytes: int, device: str, **sizes: int) -> None:
    """Refuse a shape whose tensors do not fit in memory, before anything is measured.

    Args:
        shape: the shape, which the error names.
        nbytes: the bytes of the tensors.
        device: the device that has to hold the tensors.
        sizes: other numbers that the error names.

    Raises:
        ArgumentError: they do not fit.
    """
    available = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_bytes()
    if available is not None and nbytes > available:
        listed = ", ".join(f"{name} {value:,}" for name, value in sizes.items())
        rule = f"must fit in memory: {nbytes / 2**30:,.1f} GiB with {listed}; {available / 2**30:,.1f} are free"
        raise ArgumentError("shape", str(shape), rule)


def without_repetitions(values: Iterable[_Any]) -> list[_Any]:
    """List values without repetitions, so that nothing is measured twice."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class Shape:
    """The sizes of attention: ``9/3/64`` for heads, key–value heads and head dim; ``16/512+64`` for absorbed MLA.

    For example ``Shape(32, 8, 128, 128)`` is ``Shape.parse("32/8/128")``.

    Attributes:
        H: the number of query heads.
        K: the number of key–value heads.
        D: the width of a query and of a key.
        V: the width of a value.
        is_latent: whether values are the keys' first columns.
    """

    H: int
    K: int
    D: int
    V: int
    is_latent: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read a shape from text.

        Raises:
            ArgumentError: the text has neither of the two forms.
        """
        rule = "must be HEADS/KV_HEADS/HEAD_DIM or, for absorbed MLA, HEADS/RANK+ROPE, such as 32/8/128 or 16/512+64"
        parts = text.split("/")
        try:
            if len(parts) == 2:
                rank, rope = (int(part) for part in parts[1].split("+"))
                shape = cls(int(parts[0]), 1, rank + rope, rank, is_latent=True)
            else:
                H, K, D = (int(part) for part in parts)
                shape = cls(H, K, D, D)
        except ValueError:
            raise ArgumentError("shape", text, rule) from None
        if min(shape.H, shape.K, shape.V) < 1 or shape.D < shape.V or shape.H % shape.K:
            raise ArgumentError("shape", text, f"{rule}; heads a multiple of KV heads")
        check_sizes(shape=(shape.H, shape.D))
        return shape

    def __str__(self) -> str:
        return f"{self.H}/{self.V}+{self.D - self.V}" if self.is_latent else f"{self.H}/{self.K}/{self.D}"

    def nbytes(self, batch: int, length: int, itemsize: int) -> int:
        """Bytes of a cache."""
        width = self.D if self.is_latent else self.D + self.V
        return batch * self.K * length * width * itemsize

    def flops(self, batch: int, length: int, tokens: int = 1) -> int:
        """FLOPs of scores and mixtures, of all pairs of tokens."""
        return 2 * batch * self.H * tokens * length * (self.D + self.V)


SHAPES = tuple(Shape.parse(text) for text in ("9/3/64", "32/32/128", "32/8/128", "32/1/128", "16/512+64"))
QUICK = tuple(Shape.parse(text) for text in ("9/3/64", "32/8/128", "16/512+64"))


GridPoint = tuple[torch.dtype, Shape, int, int]
"""The dtype, the shape, the number of sequences and the number of tokens in the cache of one case."""


@torch.inference_mode()
def bench_decode(
    *,
    shapes: Sequence[Shape] | None = None,
    lengths: Sequence[int] | None = None,
    cache_mib: int | None = None,
    batches: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    tokens: int = 1,
    device: str = "cpu",
    quick: bool = False,
    progress: Progress = silent,
) -> Bench:
    """Time one decoding step of attention alone, over a grid of sizes; caches come from memory, as in a whole model.

    For example ``bench_decode(lengths=[4096], quick=True).to_dict()``.

    Args:
        shapes: the numbers of heads and their widths; like the next four, the grid's own when None or empty.
        lengths: the numbers of tokens in the cache.
        cache_mib: the MiB of a cache, whose number of tokens follows; in place of ``lengths``.
        batches: the numbers of sequences.
        dtypes: the dtypes of queries and cache.
        tokens: S, the number of new tokens.
        device: the device to run on, ``cpu`` or ``cuda``.
        quick: whether to time a smaller grid in less than a minute, without ways that have to be compiled.
        progress: the callback that reports each case.

    Raises:
        ArgumentError: a size is not positive or does not fit in memory, ``lengths`` and ``cache_mib`` are both given,
            a dtype is not known, or there is no such device.
    """
    check_sizes(tokens=(tokens,))
    points = _grid_points(
        quick=quick, shapes=shapes, lengths=lengths, cache_mib=cache_mib, batches=batches, dtypes=dtypes
    )
    as_device(device)
    for dtype, shape, B, T in points:
        check_fits(shape, shape.nbytes(B, T, dtype.itemsize), device, length=T, batch=B)
    probes = {dtype: Probes(dtype, device) for dtype in without_repetitions(dtype for dtype, *_ in points)}
    cases = []
    for index, point in enumerate(points):
        progress("decoding", index, len(points))
        cases.append(_time_point(point, probes[point[0]], tokens=tokens, device=device, quick=quick))
        torch._dynamo.reset()
    progress("decoding", len(points), len(points))
    return Bench("decode", cases, device)


def _grid_points(
    *,
    quick: bool,
    shapes: Sequence[Shape] | None = None,
    lengths: Sequence[int] | None = None,
    cache_mib: int | None = None,
    batches: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
) -> list[GridPoint]:
    """Every point of a grid; the options are those of `bench_decode`."""
    if lengths and cache_mib is not None:
        raise ArgumentError("cache_mib", cache_mib, "must not be given together with lengths, which it decides")
    shapes = without_repetitions(shapes or (QUICK if quick else SHAPES))
    lengths = without_repetitions(lengths or ((512, 4096) if quick else LENGTHS))
    batches = without_repetitions(batches or ((1,) if quick else BATCHES))
    kinds = without_repetitions(as_dtype(text) for text in dtypes or DTYPES)
    check_sizes(length=lengths, batch=batches, cache_mib=() if cache_mib is None else (cache_mib,))
    if cache_mib is None:
        return list(itertools.product(kinds, shapes, batches, lengths))
    return [
        (dtype, shape, B, max(1, (cache_mib << 20) // shape.nbytes(B, 1, dtype.itemsize)))
        for dtype, shape, B in itertools.product(kinds, shapes, batches)
    ]


def _time_point(point: GridPoint, probes: Probes, *, tokens: int, device: str, quick: bool) -> Case:
    """Time every way to compute one point of the grid."""
    dtype, shape, B, T = point
    query = torch.randn(B, shape.H, tokens, shape.D, device=device).to(dtype)
    key = torch.randn(B, shape.K, T, shape.D, device=device).to(dtype)
    nbytes = shape.nbytes(B, T, dtype.itemsize)
    caches = _split_caches(key, shape, -(-BETWEEN // nbytes))
    ways = ways_to_attend(query, caches, with_compiled=not quick, is_causal=tokens > 1)
    choice = choose_backend(query.shape, key.shape, dtype=dtype, device=device, value_dim=shape.V)
    return run_case(
        f"{shape} × {T:,}" + (f" × {B}" if B > 1 else "") + f" {short_name(dtype)}",
        {"shape": str(shape), "length": T, "batch": B, "dtype": dtype_name(dtype), "tokens": tokens},
        ways,
        nbytes=nbytes,
        flops=shape.flops(B, T, tokens),
        probes=probes,
        budget=1.0 if quick else 3.0,
        notes={OURS: choice.backend},
    )


def _split_caches(key: Tensor, shape: Shape, count: int) -> list[tuple[Tensor, Tensor]]:
    """Make a number of caches, each of keys and values; a latent's values are its keys' first columns."""
    keys = [key, *(key.clone() for _ in range(count - 1))]
    return [(one, one[..., : shape.V] if shape.is_latent else torch.randn_like(one)) for one in keys]


def ways_to_attend(
    query: Tensor, caches: Sequence[tuple[Tensor, Tensor]], *, with_compiled: bool, is_causal: bool
) -> dict[str, Callable[[], Way]]:
    """The ways to compute attention, headwise's first, by name.

    Args:
        query: the queries, ``[B, H, S, D]``.
        caches: pairs of keys ``[B, K, T, D]`` and values ``[B, K, T, V]``, which the calls use in turn.
        with_compiled: whether ways that have to be compiled are among them.
        is_causal: whether a new token attends only to itself and to tokens before it.

    Returns:
        Functions that prepare a way and return the call to time.
    """
    key, value = caches[0]
    following = itertools.cycle(caches)  # shared by all ways, or one would find another's cache in the processor
    makers: dict[str, Callable[[], Callable[..., object]]] = {
        OURS: lambda: partial(attend, is_causal=is_causal),
        "packed": lambda: partial(attend, is_causal=is_causal, backend="packed"),
        "SDPA": lambda: _prepare_sdpa(query, key, value, is_causal),
        "Flex": lambda: _prepare_flex(query, key, value, is_causal),
        "expanded": lambda: _prepare_expanded(query, key, value, is_causal),
    }
    ways: dict[str, Callable[[], Way]] = {
        name: partial(_in_turn, make, query, following) for name, make in makers.items()
    }
    if not with_compiled:
        del ways["Flex"]
    return ways


def _in_turn(
    make: Callable[[], Callable[..., object]], query: Tensor, following: Iterator[tuple[Tensor, Tensor]]
) -> Way:
    call = make()
    return lambda: call(query, *next(following))


def expanded(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Textbook attention: keys and values are copied for every query head, and all scores are stored.

    Args:
        query: the queries, ``[B, H, S, D]``.
        key: the keys, ``[B, K, T, D]``.
        value: the values, ``[B, K, T, V]``.
        is_causal: whether a token attends only to itself and to tokens before it.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        S, T = scores.shape[-2:]
        scores = scores.masked_fill(~causal_mask(S, T, query.device), -torch.inf)
    mixed: Tensor = scores.softmax(-1) @ value
    return mixed


def _prepare_expanded(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    _check_copies(query, key, value)
    return partial(expanded, is_causal=is_causal)


def _check_copies(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse a way whose copies of keys and values would take more than half of the free memory."""
    group, available = query.shape[1] // key.shape[1], available_bytes()
    needed = group * key.shape[0] * key.shape[1] * key.shape[2] * (key.shape[3] + value.shape[3]) * key.itemsize
    if query.device.type == "cpu" and group > 1 and available is not None and needed > available / 2:
        raise UnableError(f"would copy {needed / 2**30:.1f} GiB")


def _prepare_sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    """torch's SDPA with ``enable_gqa``."""
    S, T = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if key.shape[3] != value.shape[3]:  # SDPA copies on the CPU then
        _check_copies(query, key, value)
    if is_causal and S != T:  # torch's causal flag aligns the mask to the upper left
        mask = causal_mask(S, T, query.device)
        return partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=grouped)
    return partial(F.scaled_dot_product_attention, is_causal=is_causal, enable_gqa=grouped)


def _prepare_flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    """torch's FlexAttention, compiled for the shape."""
    from torch.nn.attention.flex_attention import flex_attention

    if query.device.type == "cpu" and query.shape[-1] != value.shape[-1]:
        raise UnableError("needs keys and values of one width on the CPU")
    S, T = query.shape[2], key.shape[2]
    block_mask = causal_block_mask(S, T, None, query.device) if is_causal else None
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = query.shape[1] != key.shape[1]
    try:
        compiled(query, key, value, block_mask=block_mask, enable_gqa=grouped)
    except Exception as error:  # compilers raise many kinds
        raise UnableError(str(error).strip().splitlines()[0][:200]) from None
    return partial(compiled, block_mask=block_mask, enable_gqa=grouped)


def short_name(dtype: torch.dtype) -> str:
    """A dtype's name in a table, such as ``bf16``."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[dtype_name(dtype)]
