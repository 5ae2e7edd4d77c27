"""One new token, or a few, against a cache: the ways to compute it, and the bandwidth that is their limit.

Shapes: B batch, H query heads, K key–value heads, S new tokens, T tokens in the cache, D head dim, V value dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bench.report import OURS, Bench, Case, UnableError, Way, run_case
from headwise.checkpoints import dtype_name
from headwise.errors import ArgumentError
from headwise.hf import as_device, as_dtype
from headwise.kernels import attend, causal_mask, choose_backend
from headwise.kernels.libraries import causal_block_mask
from headwise.measurement.limits import Probes
from headwise.measurement.memory import available_bytes
from headwise.progress import Progress, silent

_Any = TypeVar("_Any")

LENGTHS = (512, 2048, 8192, 32768)
BATCHES = (1, 4)
DTYPES = ("float32", "bfloat16")
_BETWEEN = 256 << 20
"""Bytes of caches that are read in turn, so that each comes from memory as in a model, where all other layers' were
read since; more than processors' own caches hold."""
_MOST = 2**31 - 1
"""What a size may be: torch counts numbers in 64 bits, and cannot say what does not fit."""


def check_sizes(**sizes: Sequence[int]) -> None:
    """Refuse what is not positive, or could be no size, by its name."""
    for name, values in sizes.items():
        for value in values:
            if not 1 <= value <= _MOST:
                raise ArgumentError(name, value, f"must be at least 1, and at most {_MOST}")


def check_fits(shape: Shape, nbytes: int, device: str, **sizes: int) -> None:
    """Refuse tensors of a shape that memory does not hold, before anything is measured."""
    available = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_bytes()
    if available is not None and nbytes > available:
        told = ", ".join(f"{name} {value:,}" for name, value in sizes.items())
        rule = f"must fit in memory: {nbytes / 2**30:,.1f} GiB with {told}; {available / 2**30:,.1f} are free"
        raise ArgumentError("shape", str(shape), rule)


def each(values: Iterable[_Any]) -> list[_Any]:
    """Those given, once each: what is named twice is not measured twice."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class Shape:
    """What is attended with: ``9/3/64`` is heads, key–value heads, head dim; ``16/512+64`` absorbed MLA's."""

    H: int
    K: int
    D: int
    V: int
    is_latent: bool = False
    """Whether values are the keys' first columns."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read one.

        Raises:
            ArgumentError: it is neither of the two forms.
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
        """Of a cache."""
        width = self.D if self.is_latent else self.D + self.V
        return batch * self.K * length * width * itemsize

    def flops(self, batch: int, length: int, tokens: int = 1) -> int:
        """Of scores and mixtures, all of them seen."""
        return 2 * batch * self.H * tokens * length * (self.D + self.V)


SHAPES = tuple(Shape.parse(text) for text in ("9/3/64", "32/32/128", "32/8/128", "32/1/128", "16/512+64"))
QUICK = tuple(Shape.parse(text) for text in ("9/3/64", "32/8/128", "16/512+64"))


GridPoint = tuple[torch.dtype, Shape, int, int]
"""Dtype, shape, sequences and tokens in the cache of one case."""


class GridOptions(TypedDict, total=False):
    """The grid of `bench_decode`, which describes the fields; a field left out, empty or None is the grid's own."""

    shapes: Sequence[Shape] | None
    lengths: Sequence[int] | None
    cache_mib: int | None
    batches: Sequence[int] | None
    dtypes: Sequence[str] | None


@torch.inference_mode()
def bench_decode(
    *,
    tokens: int = 1,
    device: str = "cpu",
    quick: bool = False,
    progress: Progress = silent,
    **grid: Unpack[GridOptions],
) -> Bench:
    """Time one decoding step of attention alone, over a grid; caches come from memory, as in a model of many layers.

    Args:
        tokens: S, new tokens.
        device: ``cpu`` or ``cuda``.
        quick: a smaller grid, in less than a minute, without what has to be compiled.
        progress: called for each case.
        grid: any of ``shapes`` (heads and widths), ``lengths`` (tokens in the cache), ``cache_mib`` (in the place of
            lengths: as many tokens as make a cache of so many MiB), ``batches`` (sequences) and ``dtypes`` (of
            queries and cache).

    Raises:
        ArgumentError: a size is not positive or does not fit in memory, ``lengths`` and ``cache_mib`` are both given,
            a dtype is not known, or there is no such device.
    """
    check_sizes(tokens=(tokens,))
    points = _points(quick=quick, **grid)
    as_device(device)
    for dtype, shape, B, T in points:
        check_fits(shape, shape.nbytes(B, T, dtype.itemsize), device, length=T, batch=B)
    probes = {dtype: Probes(dtype, device) for dtype in each(dtype for dtype, *_ in points)}
    cases = []
    for index, point in enumerate(points):
        progress("decoding", index, len(points))
        cases.append(_time_point(point, probes[point[0]], tokens=tokens, device=device, quick=quick))
        torch._dynamo.reset()
    progress("decoding", len(points), len(points))
    return Bench("decode", cases, device)


def _points(
    *,
    quick: bool,
    shapes: Sequence[Shape] | None = None,
    lengths: Sequence[int] | None = None,
    cache_mib: int | None = None,
    batches: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
) -> list[GridPoint]:
    """Every point of a grid; options as `bench_decode`'s."""
    if lengths and cache_mib is not None:
        raise ArgumentError("cache_mib", cache_mib, "must not be given beside lengths, which it makes")
    shapes = each(shapes or (QUICK if quick else SHAPES))
    lengths = each(lengths or ((512, 4096) if quick else LENGTHS))
    batches = each(batches or ((1,) if quick else BATCHES))
    kinds = each(as_dtype(text) for text in dtypes or DTYPES)
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
    caches = _caches(key, shape, -(-_BETWEEN // nbytes))
    ways = ways_to_attend(query, caches, with_compiled=not quick, is_causal=tokens > 1)
    choice = choose_backend(query.shape, key.shape, dtype=dtype, device=device)
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


def _caches(key: Tensor, shape: Shape, count: int) -> list[tuple[Tensor, Tensor]]:
    """So many caches of these keys; a latent's values are its keys' first columns."""
    keys = [key, *(key.clone() for _ in range(count - 1))]
    return [(own, own[..., : shape.V] if shape.is_latent else torch.randn_like(own)) for own in keys]


def ways_to_attend(
    query: Tensor, caches: Sequence[tuple[Tensor, Tensor]], *, with_compiled: bool, is_causal: bool
) -> dict[str, Callable[[], Way]]:
    """All there is to set beside ours, by name; each makes the call when asked, which takes the caches in turn."""
    key, value = caches[0]
    following = itertools.cycle(caches)  # of all ways: one would find in the processor what another has just read
    makers: dict[str, Callable[[], Callable[..., object]]] = {
        OURS: lambda: partial(attend, is_causal=is_causal),
        "packed": lambda: partial(attend, is_causal=is_causal, backend="packed"),
        "SDPA": lambda: _sdpa(query, key, value, is_causal),
        "Flex": lambda: _flex(query, key, value, is_causal),
        "expanded": lambda: _expanded(query, key, value, is_causal),
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
    """The way of most guides: keys and values copied for every query head, all scores held, one softmax."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        S, T = scores.shape[-2:]
        scores = scores.masked_fill(~causal_mask(S, T, query.device), -torch.inf)
    mixed: Tensor = scores.softmax(-1) @ value
    return mixed


def _expanded(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    _check_copies(query, key, value)
    return partial(expanded, is_causal=is_causal)


def _check_copies(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what would copy keys and values for every query head into more than half of the memory there is."""
    group, available = query.shape[1] // key.shape[1], available_bytes()
    needed = group * key.shape[0] * key.shape[1] * key.shape[2] * (key.shape[3] + value.shape[3]) * key.itemsize
    if query.device.type == "cpu" and group > 1 and available is not None and needed > available / 2:
        raise UnableError(f"would copy {needed / 2**30:.1f} GiB")


def _sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    """torch's own, told that heads are grouped."""
    S, T = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if key.shape[3] != value.shape[3]:  # on the CPU it copies then
        _check_copies(query, key, value)
    if is_causal and S != T:  # torch's flag is for the upper left
        mask = causal_mask(S, T, query.device)
        return partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=grouped)
    return partial(F.scaled_dot_product_attention, is_causal=is_causal, enable_gqa=grouped)


def _flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Callable[..., object]:
    """torch's FlexAttention, compiled for this shape."""
    from torch.nn.attention.flex_attention import flex_attention

    if query.device.type == "cpu" and query.shape[-1] != value.shape[-1]:
        raise UnableError("takes one width on the CPU")
    S, T = query.shape[2], key.shape[2]
    block_mask = causal_block_mask(S, T, None, query.device) if is_causal else None
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = query.shape[1] != key.shape[1]
    try:
        compiled(query, key, value, block_mask=block_mask, enable_gqa=grouped)
    except Exception as error:  # a compiler's errors are of any kind
        raise UnableError(str(error).strip().splitlines()[0][:200]) from None
    return partial(compiled, block_mask=block_mask, enable_gqa=grouped)


def short_name(dtype: torch.dtype) -> str:
    """For a table."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[dtype_name(dtype)]
