"""Measure the curves of a machine: projections, products of heads, attention, and what else layers and models do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.base import per_head
from headwise.cost.layer import cache_values
from headwise.hf.interface import attention_forward
from headwise.prediction import MANY, Curves, Device, Grid, Pass, operators
from headwise.prediction import seconds as predicted
from headwise.prediction.memory import weight_bytes
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.profiling.pace import READING, Pace, bound_by, in_turn, projections
from headwise.progress import Progress, silent
from headwise.specs import ModelSpec

READ = (6 << 20, 20 << 20, 48 << 20, READING["memory"])
"""Bytes that a pass reads: some that a processor's own caches hold, and some that come from memory."""

CACHES = (6 << 20, 24 << 20, 128 << 20)
"""The same of passes that read a cache."""

CODED_CACHES = (8 << 20, 64 << 20)
"""The same of a cache in fewer bits, which takes long to fill, and whose reading the processor bounds."""

FEW = (1, 4, 8, 16, 64)
"""Tokens of projections whose weights are read in turn."""

FEW_WEIGHTS = (1 << 18, 1 << 22)
"""Values of such weights, small and large: what both take tells a call from its values."""


MANY_TOKENS = (64, 256, 1024)
WEIGHTS = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
PRODUCT_TOKENS = (1, 2, 4, 8, 16)
PRODUCT_WEIGHTS = (1 << 15, 1 << 17, 1 << 19)
PROMPTS = (16, 64, 256, 1024, 2048)

HEADS = 16
"""Query heads of decoders whose attention is timed."""

KV_HEADS = (16, 4, 1)
LATENT = (192, 32)
LATENT_HEADS = (4, 8, 16)
BITS = {0.0: None, 8.5: "int8", 5.0: "int4:32"}
"""Bits of a cached value, its scale included, and the format that has them; 0 for the dtype's own."""

HIDDEN = (128, 512, 1024)
STATES = (1 << 10, 1 << 12, 1 << 14, 1 << 15, 36 << 10, 1 << 17, 384 << 10)
"""Values of a hidden state, multiples of `HIDDEN`. Beyond 2^15 of them torch works on a tensor in several threads,
which have to be woken."""

LAYERS = (1, 4)
SHORT = 32
"""Tokens of a context that takes next to nothing."""

PATIENCE = 0.05
"""Seconds that a call is repeated for."""

_CALLS = 4 / 7
"""Calls for each projection of a layer: queries, keys and values are one call, and gate and values of a network."""

_LEAST_FOR_A_BYTE = 1e-13
_LEAST = 1e-7
"""A difference of times that noise makes negative counts as so many seconds."""

_LEAST_SHARE = 0.1
"""The least share of a layer's time that it takes besides its operators."""


@torch.inference_mode()
def measure_curves(dtype: torch.dtype, device: Device, *, progress: Progress = silent) -> Curves:
    """The curves of a dtype on this machine's processor.

    For example ``measure_curves(torch.float32, device("laptop")).many.at(100, 2**20)``.

    Args:
        dtype: of weights, activations and cache.
        device: any, for what is not measured.
        progress: told of each group of operators.
    """
    pace = Pace(dtype)
    besides: dict[float, float] = {}
    stages: dict[str, Callable[[], Grid]] = {
        "many": lambda: _grid(MANY_TOKENS, WEIGHTS, partial(_many, pace, dtype)),
        "product": lambda: _grid(PRODUCT_TOKENS, PRODUCT_WEIGHTS, partial(_product, pace, dtype)),
        "prompt": lambda: _prompts(pace, dtype),
        **{f"core {bits:g}": partial(_cores, pace, dtype, bits, besides) for bits in BITS},
        "latent core": lambda: _latent_cores(pace, dtype),
    }
    progress("profiling", 0, len(stages) + 2)
    call, few = _few_tokens(pace, dtype)
    found: dict[str, Grid] = {}
    for index, (name, measure) in enumerate(stages.items()):
        progress("profiling", index + 1, len(stages) + 2)
        found[name] = measure()
    nothing = Grid(x=(1, 2), y=(1, 2), seconds=((_LEAST, _LEAST), (_LEAST, _LEAST)))
    parts = Curves(
        few=few,
        many=found["many"],
        product=found["product"],
        prompt=found["prompt"],
        core={bits: found[f"core {bits:g}"] for bits in BITS},
        latent_core={0.0: found["latent core"]},
        coded={bits: max(besides[bits] - besides[0.0], _LEAST) for bits in BITS if bits},
        latent_input=nothing,
        norm=nothing,
        embedding=nothing,
        call=call,
        pace=pace.reference,
    )
    progress("profiling", len(stages) + 1, len(stages) + 2)
    whole = _around(pace, parts, dtype, device)
    progress("profiling", len(stages) + 2, len(stages) + 2)
    return whole


def _grid(x: Sequence[int], y: Sequence[int], measure: Callable[[int, int], float]) -> Grid:
    return Grid(x=tuple(x), y=tuple(y), seconds=tuple(tuple(measure(a, b) for b in y) for a in x))


def _few_tokens(pace: Pace, dtype: torch.dtype) -> tuple[Grid, Grid]:
    """Seconds of a projection of few tokens whatever its size, and for each value of its weight besides.

    Both are told apart by what small and large weights take.
    """
    calls: dict[tuple[int, int], float] = {}
    values: dict[tuple[int, int], float] = {}
    for tokens, read in product(FEW, READ):
        most = read // dtype.itemsize
        small, large = (min(weights, most // 2) for weights in FEW_WEIGHTS)
        short, long = (_projection_seconds(pace, dtype, tokens, weights, read) for weights in (small, large))
        # Noise may make a large one seem quicker than it can be, or a small one take no call.
        value = max((long - short) / (large - small), long / large / 4)
        values[tokens, read] = value
        calls[tokens, read] = max(short - small * value, _LEAST) * _CALLS
    return _grid(FEW, READ, lambda *place: calls[place]), _grid(FEW, READ, lambda *place: values[place])


def _projection_seconds(pace: Pace, dtype: torch.dtype, tokens: int, weights: int, read: int) -> float:
    """Seconds of one projection, where ``read`` bytes of weights take turns."""
    copies = max(read // (weights * dtype.itemsize), 1)
    return pace.median(projections(dtype, tokens, weights, copies), bound_by(read), least=3) / copies


def _many(pace: Pace, dtype: torch.dtype, tokens: int, weights: int) -> float:
    return pace.median(projections(dtype, tokens, weights, 2), "products", least=3) / 2


def _product(pace: Pace, dtype: torch.dtype, tokens: int, weights: int) -> float:
    """A product of each of several heads with a matrix of its own."""
    heads, inner = 8, 64
    matrices = [torch.randn(heads, inner, weights // heads // inner).to(dtype) for _ in range(8)]
    states = torch.randn(tokens, heads, 1, inner).to(dtype)
    call = in_turn([partial(per_head, states, matrix) for matrix in matrices])
    return pace.median(call, "products", least=3) / len(matrices)


def _prompts(pace: Pace, dtype: torch.dtype) -> Grid:
    """Attention of prompts to themselves; proportional to FLOPs for one number of new tokens."""
    heads, width = 8, 64
    rows = []
    for tokens in PROMPTS:
        query, key, value = (torch.randn(1, heads, tokens, width).to(dtype) for _ in range(3))
        flops = 2 * heads * 2 * width * tokens * (tokens + 1) / 2
        rate = pace.median(partial(_attention, query, key, value), "products") / flops
        rows.append((rate * 1e6, rate * 1e12))
    return Grid(x=PROMPTS, y=(1e6, 1e12), seconds=tuple(rows))


class _Causal(nn.Module):
    is_causal = True


_MODULE = _Causal()


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_forward(_MODULE, query, key, value, None)[0]


def _cores(pace: Pace, dtype: torch.dtype, bits: float, besides: dict[float, float]) -> Grid:
    """Attention of one token to heads; ``besides`` is told what a layer takes after a short context."""
    sizes = {"hidden_size": 64 * HEADS, "num_heads": HEADS, "num_layers": 2, "intermediate_size": 64}
    decoders = [Decoder(**sizes, num_kv_heads=heads) for heads in KV_HEADS]  # type: ignore[arg-type]
    found, besides[bits] = _by_length(pace, decoders, dtype, bits)
    return found


def _latent_cores(pace: Pace, dtype: torch.dtype) -> Grid:
    """Absorbed attention of one token to latents."""
    decoders = [
        Decoder(hidden_size=256, num_heads=heads, num_layers=2, intermediate_size=64, latent=LATENT)
        for heads in LATENT_HEADS
    ]
    return _by_length(pace, decoders, dtype, 0.0)[0]


def _by_length(pace: Pace, decoders: Sequence[Decoder], dtype: torch.dtype, bits: float) -> tuple[Grid, float]:
    """Seconds for each byte of cache: what contexts take more than a short one, in decoders whose FLOPs a byte grow.

    Returns:
        And the seconds of a layer after the short one.
    """
    after_short: list[float] = []
    caches = CODED_CACHES if bits else CACHES
    columns = []
    intensities = []
    for decoder in decoders:
        model, spec = decoder.build(dtype), decoder.spec()
        token = sum(map(cache_values, spec.layers)) * (bits / 8 or dtype.itemsize)
        column = []
        short = _step_seconds(pace, model, spec, SHORT, token, bits)
        after_short.append(short / decoder.num_layers)
        for read in caches:
            tokens = max(int(read / token), 2 * SHORT)
            more = _step_seconds(pace, model, spec, tokens, token, bits) - short
            column.append(more / (tokens - SHORT) / token)
        # Noise may make a difference of times too small, or negative.
        least = max(statistics.median(column) / 2, _LEAST_FOR_A_BYTE)
        columns.append([max(time, least) for time in column])
        step = Pass(total=1000, dtype=str(dtype).removeprefix("torch."), cache_bits=bits or None, impl="absorbed")
        core = next(each for each in operators(spec, step) if each.kind in ("core", "latent core"))
        intensities.append(core.flops / core.cache_bytes)
    seconds_of = tuple(zip(*columns, strict=True))
    return Grid(x=caches, y=tuple(intensities), seconds=seconds_of), statistics.median(after_short)


def _step_seconds(pace: Pace, model: Any, spec: ModelSpec, tokens: int, token: float, bits: float) -> float:
    """Seconds of a decode step after so many tokens, of ``token`` bytes each."""
    cache = filled_cache(model, spec, batch=1, tokens=tokens, quantize=BITS[bits])
    return pace.median(decode_step(model, cache, 1), bound_by(tokens * token), patience=4 * PATIENCE)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The time of a decoder in a pass, and what its operators take by the curves."""

    seconds: float
    layers: float
    head: float


def _around(pace: Pace, parts: Curves, dtype: torch.dtype, device: Device) -> Curves:
    """What layers and models do besides: the times of whole decoders less those of their operators."""
    plain = [Decoder(hidden_size=hidden, num_heads=hidden // 64, intermediate_size=3 * hidden) for hidden in HIDDEN]
    latent = [replace(decoder, latent=(decoder.hidden_size // 4, 32)) for decoder in plain]
    rest, around = _rest(pace, plain, parts, dtype, device)
    rest_of_latents, _ = _rest(pace, latent, parts, dtype, device)

    def grid(times: Mapping[tuple[int, int], float]) -> Grid:
        return _grid(STATES, HIDDEN, lambda values, hidden: max(times[values, hidden], _LEAST))

    return replace(
        parts,
        norm=grid({key: time / 2 for key, time in rest.items()}),
        embedding=grid(around),
        latent_input=grid({key: rest_of_latents[key] - time for key, time in rest.items()}),
    )


def _rest(
    pace: Pace, decoders: Sequence[Decoder], parts: Curves, dtype: torch.dtype, device: Device
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Of each size of a state and its width: what is left of a layer's time, and of the model's around them."""
    rest, around = {}, {}
    for decoder in decoders:
        few, many = (_runs(pace, replace(decoder, num_layers=layers), parts, dtype, device) for layers in LAYERS)
        for values in STATES:
            layer = max(many[values].seconds - few[values].seconds, _LEAST) / (LAYERS[1] - LAYERS[0])
            known = (many[values].layers - few[values].layers) / (LAYERS[1] - LAYERS[0])
            # Operators that were measured alone may seem to take more than the layer that they are in.
            rest[values, decoder.hidden_size] = max(layer - known, _LEAST_SHARE * layer)
            around[values, decoder.hidden_size] = few[values].seconds - LAYERS[0] * layer - few[values].head
    return rest, around


def _runs(pace: Pace, decoder: Decoder, parts: Curves, dtype: torch.dtype, device: Device) -> dict[int, _Run]:
    """A decoder's passes by the sizes of their states."""
    model, spec = decoder.build(dtype), decoder.spec()
    name = str(dtype).removeprefix("torch.")
    known = replace(device, curves={name: parts})
    found = {}
    for values in STATES:
        tokens = values // decoder.hidden_size
        if tokens >= MANY:
            call: Callable[[], object] = prompt_call(model, tokens)
            forward = Pass(new=tokens, total=tokens, dtype=name)
        else:
            call = decode_step(model, filled_cache(model, spec, batch=tokens, tokens=32), tokens)
            forward = Pass(batch=tokens, total=33, dtype=name, impl="absorbed" if decoder.latent else "auto")
        work = [each for each in operators(spec, forward) if each.kind not in ("norm", "embedding")]
        times = {each.name: each.seconds for each in predicted(work, known, forward)}
        head = times.pop("head")
        bound = "products" if tokens >= MANY else bound_by(weight_bytes(spec, forward))
        measured = pace.median(call, bound, least=3, patience=2 * PATIENCE)
        found[values] = _Run(seconds=measured, layers=sum(times.values()), head=head)
    return found
