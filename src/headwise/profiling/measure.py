"""Measure the curves of a machine: projections, products of heads, attention, and what else layers and models do."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.base import per_head
from headwise.checkpoints import dtype_name
from headwise.cost.layer import cache_values
from headwise.hf.interface import attention_forward
from headwise.prediction import MANY, Curves, Device, Grid, Operator, Pass, operators
from headwise.prediction import seconds as predicted
from headwise.prediction.roofline import pass_bytes
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.profiling.grids import BITS, CPU, Grids
from headwise.profiling.pace import HERE, Bound, Pace, bound_by, in_turn, projections
from headwise.progress import Progress, silent
from headwise.specs import ModelSpec

PATIENCE = 0.05
"""Seconds that a call is repeated for."""

_WIDEST = 512
"""The widest latent of the decoders of `_around`."""

_LEAST_FOR_A_BYTE = 1e-13
_LEAST = 1e-7
"""A difference of times that noise makes negative counts as so many seconds."""

_MOST_IN_MODELS = 1.5
"""The most by which projections are taken to be slower, or faster, in models than one after another."""

_LEAST_SHARE = 0.1
"""The least share of a layer's time that is not its operators'."""


class _Machine:
    """A device that is measured in one dtype."""

    def __init__(self, dtype: torch.dtype, known: Device, grids: Grids, place: torch.device) -> None:
        self.dtype, self.known, self.grids, self.place = dtype, known, grids, place
        self.name = dtype_name(dtype)
        self.pace = Pace(dtype, device=place)


def measure_curves(
    dtype: torch.dtype,
    device: Device,
    *,
    grids: Grids = CPU,
    place: torch.device = HERE,
    progress: Progress = silent,
) -> Curves:
    """The curves of a dtype on this machine's processor, or on its GPU.

    For example ``measure_curves(torch.float32, device("laptop")).many.at(100, 2**20)``.

    Args:
        dtype: of weights, activations and cache.
        device: any, for what is not measured.
        grids: sizes.
        place: that operators run on.
        progress: told of each group of operators.
    """
    machine = _Machine(dtype, device, grids, place)
    after_short: dict[float, dict[int, float]] = {}
    stages: dict[str, Callable[[], Grid]] = {
        "many": lambda: _grid(grids.tokens, grids.weights, partial(_many, machine)),
        "product": lambda: _grid(grids.product_tokens, grids.product_weights, partial(_product, machine)),
        "prompt": lambda: _prompts(machine),
        **{f"core {bits:g}": partial(_cores, machine, bits, after_short) for bits in BITS},
        "latent core": lambda: _latent_cores(machine),
    }
    progress("profiling", 0, len(stages) + 2)
    few = {float(weights): _few_tokens(machine, weights) for weights in grids.few_weights}
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
        coded={bits: _coded(after_short[bits], after_short[0.0]) for bits in BITS if bits},
        latent_input=nothing,
        norm=nothing,
        embedding=nothing,
        pace=machine.pace.reference,
    )
    progress("profiling", len(stages) + 1, len(stages) + 2)
    whole = _around(machine, parts)
    if grids.few_reads:
        whole = _in_models(machine, whole)
    progress("profiling", len(stages) + 2, len(stages) + 2)
    return whole


def _grid(x: Sequence[int], y: Sequence[int], measure: Callable[[int, int], float]) -> Grid:
    return Grid(x=tuple(x), y=tuple(y), seconds=tuple(tuple(measure(a, b) for b in y) for a in x))


def _few_tokens(machine: _Machine, weights: int) -> Grid:
    """Seconds of a projection of few tokens, over these and the bytes of weights that take turns."""

    def measure(tokens: int, read: int) -> float:
        copies = max(read // (weights * machine.dtype.itemsize), 1)
        call = projections(machine.dtype, tokens, weights, copies, machine.place)
        return machine.pace.median(call, bound_by(read), least=3) / copies

    return _grid(machine.grids.few_tokens, machine.grids.few_reads, measure)


def _many(machine: _Machine, tokens: int, weights: int) -> float:
    copies = max(machine.grids.turns // (weights * machine.dtype.itemsize), 2)
    bound: Bound = "products" if tokens >= MANY else "memory"
    return (
        machine.pace.median(projections(machine.dtype, tokens, weights, copies, machine.place), bound, least=3)
        / copies
    )


def _product(machine: _Machine, tokens: int, weights: int) -> float:
    """A product of each of several heads with a matrix of its own."""
    heads, inner = 8, 64
    noise = partial(torch.randn, device=machine.place)
    copies = max(machine.grids.turns // (weights * machine.dtype.itemsize), 8)
    matrices = [noise(heads, inner, weights // heads // inner).to(machine.dtype) for _ in range(copies)]
    states = noise(tokens, heads, 1, inner).to(machine.dtype)
    call = in_turn([partial(per_head, states, matrix) for matrix in matrices])
    return machine.pace.median(call, "products", least=3) / len(matrices)


def _prompts(machine: _Machine) -> Grid:
    """Attention of prompts to themselves, over their tokens and FLOPs for each pair of these."""
    grids = machine.grids
    of_a_head = 4 * grids.head_dim

    def measure(tokens: int, heads: int) -> float:
        noise = partial(torch.randn, 1, heads, tokens, grids.head_dim, device=machine.place)
        query, key, value = (noise().to(machine.dtype) for _ in range(3))
        return machine.pace.median(partial(_attention, query, key, value), "products")

    heads = grids.prompt_heads
    times = [[measure(tokens, count) for count in heads] for tokens in grids.prompts]
    if len(heads) == 1:  # proportional to it
        heads, times = (1, *heads), [[time / heads[0], time] for (time,) in times]
    y = tuple(count * of_a_head for count in heads)
    return Grid(x=grids.prompts, y=y, seconds=tuple(map(tuple, times)))


class _Causal(nn.Module):
    is_causal = True


_MODULE = _Causal()


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_forward(_MODULE, query, key, value, None)[0]


def _cores(machine: _Machine, bits: float, after_short: dict[float, dict[int, float]]) -> Grid:
    """Attention of one token to heads; ``after_short`` is told what a layer takes after a short context."""
    grids = machine.grids
    one = replace(_cached(machine, grids.head_dim * grids.heads), num_heads=grids.heads)
    kv_heads = grids.coded_kv_heads if bits else grids.kv_heads
    found, layers = _by_length(machine, [replace(one, num_kv_heads=heads) for heads in kv_heads], bits)
    after_short[bits] = dict(zip(kv_heads, layers, strict=True))
    return found


def _coded(codes: Mapping[int, float], plain: Mapping[int, float]) -> float:
    """What a layer does besides where its cache is in codes: the median over what was measured of both."""
    return max(statistics.median(codes[heads] - plain[heads] for heads in codes), _LEAST)


def _latent_cores(machine: _Machine) -> Grid:
    """Absorbed attention of one token to latents."""
    grids = machine.grids
    one = replace(_cached(machine, grids.latent_hidden), latent=grids.latent)
    return _by_length(machine, [replace(one, num_heads=heads) for heads in grids.latent_heads], 0.0)[0]


def _cached(machine: _Machine, hidden: int) -> Decoder:
    """A decoder whose cache is read: its networks read enough between one layer's and the next's."""
    inner = max(_between(machine, hidden), 64)
    return Decoder(hidden_size=hidden, num_layers=2, head_dim=machine.grids.head_dim, intermediate_size=inner)


def _between(machine: _Machine, hidden: int) -> int:
    """The inner width of a network whose weights are all that a layer has to read between caches."""
    return machine.grids.between // (3 * hidden * machine.dtype.itemsize) // 64 * 64


def _by_length(machine: _Machine, decoders: Sequence[Decoder], bits: float) -> tuple[Grid, list[float]]:
    """Seconds for each byte of cache: what contexts take more than a short one, in decoders whose FLOPs a byte grow.

    Returns:
        And the seconds of each decoder's layers after the short one.
    """
    grids = machine.grids
    after_short: list[float] = []
    caches = grids.coded_caches if bits else grids.caches
    columns = []
    intensities = []
    for decoder in decoders:
        model, spec = decoder.build(machine.dtype, machine.place), decoder.spec()
        token = sum(map(cache_values, spec.layers)) * (bits / 8 or machine.dtype.itemsize)
        column = []
        short = _step_seconds(machine, model, spec, grids.short, token, bits)
        after_short.append(short / decoder.num_layers)
        for read in caches:
            tokens = max(int(read / token), 2 * grids.short)
            more = _step_seconds(machine, model, spec, tokens, token, bits) - short
            column.append(more / (tokens - grids.short) / token)
        # Noise may make a difference of times too small, or negative.
        least = max(statistics.median(column) / 2, _LEAST_FOR_A_BYTE)
        columns.append([max(time, least) for time in column])
        step = Pass(total=1000, dtype=machine.name, cache_bits=bits or None, impl="absorbed")
        core = next(each for each in operators(spec, step) if each.kind in ("core", "latent core"))
        intensities.append(core.flops / core.cache_bytes)
    seconds_of = tuple(zip(*columns, strict=True))
    x = caches if grids.few_reads else tuple(read / decoders[0].num_layers for read in caches)
    return Grid(x=x, y=tuple(intensities), seconds=seconds_of), after_short


def _step_seconds(machine: _Machine, model: Any, spec: ModelSpec, tokens: int, token: float, bits: float) -> float:
    """Seconds of a decode step after so many tokens, of ``token`` bytes each."""
    cache = filled_cache(model, spec, batch=1, tokens=tokens, quantize=BITS[bits])
    bound = bound_by(tokens * token + machine.grids.between)
    return machine.pace.median(decode_step(model, cache, 1), bound, patience=4 * PATIENCE)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The time of a decoder in a pass, and what its operators take by the curves."""

    seconds: float
    layers: float
    head: float


def _around(machine: _Machine, parts: Curves) -> Curves:
    """What layers and models do besides: the times of whole decoders less those of their operators."""
    grids = machine.grids
    plain = [
        Decoder(
            hidden_size=hidden,
            num_heads=hidden // grids.head_dim,
            head_dim=grids.head_dim,
            intermediate_size=3 * hidden,
        )
        for hidden in grids.hidden
    ]
    latent = [replace(each, latent=(min(each.hidden_size // 4, _WIDEST), 32)) for each in plain]
    rest, around = _rest(machine, plain, parts)
    rest_of_latents, _ = _rest(machine, latent, parts)

    def grid(times: Mapping[tuple[int, int], float]) -> Grid:
        return _grid(grids.states, grids.hidden, lambda values, hidden: max(times[values, hidden], _LEAST))

    return replace(
        parts,
        norm=grid({key: time / 2 for key, time in rest.items()}),
        embedding=grid(around),
        latent_input=grid({key: rest_of_latents[key] - time for key, time in rest.items()}),
    )


def _in_models(machine: _Machine, whole: Curves) -> Curves:
    """The curves with projections as slow, or as fast, as in whole models: those from memory, and those of prompts.

    They are multiplied by the median, over several decoders, of what is left of a pass's time for them, divided by
    what was predicted. With other work between them, during which nothing is fetched, those of few tokens mostly take
    longer; those of many take less.
    """
    grids = machine.grids
    of_steps, of_prompts = [], []
    for decoder, tokens in zip(grids.whole, grids.whole_prompts, strict=True):
        model, spec = decoder.build(machine.dtype, machine.place), decoder.spec()
        step = Pass(total=grids.short + 1, dtype=machine.name)
        cache = filled_cache(model, spec, batch=1, tokens=grids.short)
        of_steps.append(_of_projections(machine, whole, spec, step, decode_step(model, cache, 1)))
        prompt = Pass(new=tokens, total=tokens, dtype=machine.name)
        of_prompts.append(_of_projections(machine, whole, spec, prompt, prompt_call(model, tokens)))

    def scaled(grid: Grid, ratios: Sequence[float]) -> Grid:
        rows = (tuple(map(operator.mul, row, ratios)) for row in grid.seconds)
        return replace(grid, seconds=tuple(rows))

    of_memory = [_bounded(of_steps) if bound_by(read) == "memory" else 1.0 for read in grids.few_reads]
    few = {weights: scaled(grid, of_memory) for weights, grid in whole.few.items()}
    return replace(whole, few=few, many=scaled(whole.many, [_bounded(of_prompts)] * len(grids.weights)))


def _of_projections(
    machine: _Machine, curves: Curves, spec: ModelSpec, forward: Pass, call: Callable[[], object]
) -> float:
    """Seconds of a pass's projections in a model, divided by those by the curves."""
    work = operators(spec, forward)
    times = predicted(work, replace(machine.known, curves={machine.name: curves}), forward)
    kinds = {each.name: each.kind for each in work}
    linear = sum(each.seconds for each in times if kinds[each.name] == "linear")
    besides = sum(each.seconds for each in times) - linear
    return (machine.pace.median(call, _bound(work, forward), patience=4 * PATIENCE) - besides) / linear


def _bound(work: Sequence[Operator], forward: Pass) -> Bound:
    return bound_by(pass_bytes(work)) if forward.new == 1 else "products"


def _bounded(ratios: Sequence[float]) -> float:
    return min(max(statistics.median(ratios), 1 / _MOST_IN_MODELS), _MOST_IN_MODELS)


def _rest(
    machine: _Machine, decoders: Sequence[Decoder], parts: Curves
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Of each size of a state and its width: what is left of a layer's time, and of the model's around them."""
    rest, around = {}, {}
    layers = machine.grids.layers
    for decoder in decoders:
        few, many = (_runs(machine, replace(decoder, num_layers=count), parts) for count in layers)
        for values in machine.grids.states:
            layer = max(many[values].seconds - few[values].seconds, _LEAST) / (layers[1] - layers[0])
            known = (many[values].layers - few[values].layers) / (layers[1] - layers[0])
            # Operators that were measured alone may seem to take more than the layer that they are in.
            rest[values, decoder.hidden_size] = max(layer - known, _LEAST_SHARE * layer)
            around[values, decoder.hidden_size] = few[values].seconds - layers[0] * layer - few[values].head
    return rest, around


def _runs(machine: _Machine, decoder: Decoder, parts: Curves) -> dict[int, _Run]:
    """A decoder's passes by the sizes of their states."""
    states = [(values, values // decoder.hidden_size) for values in machine.grids.states]
    known = replace(machine.known, curves={machine.name: parts})
    # Passes of few tokens read all weights each time. Those of one layer and of several then have to come from the
    # same place, or their difference is that of the places: small ones lie in the processor's caches.
    one_head = None if decoder.latent else 1
    # A GPU's caches hold nothing that is read again, so there they have to come from its memory.
    inner = max(decoder.hidden_size // 4, _between(machine, decoder.hidden_size))
    small = replace(decoder, num_kv_heads=one_head, intermediate_size=inner)
    model, spec = small.build(machine.dtype, machine.place), small.spec()
    found = {}
    for values, tokens in states:
        if tokens < MANY:
            cache = filled_cache(model, spec, batch=tokens, tokens=machine.grids.short)
            impl = "absorbed" if decoder.latent else "auto"
            step = Pass(batch=tokens, total=machine.grids.short + 1, dtype=machine.name, impl=impl)
            found[values] = _run(machine, decode_step(model, cache, tokens), spec, step, known)
    model, spec = decoder.build(machine.dtype, machine.place), decoder.spec()
    for values, tokens in states:
        if tokens >= MANY:
            prompt = Pass(new=tokens, total=tokens, dtype=machine.name)
            found[values] = _run(machine, prompt_call(model, tokens), spec, prompt, known)
    return found


def _run(machine: _Machine, call: Callable[[], object], spec: ModelSpec, forward: Pass, known: Device) -> _Run:
    """One pass, measured, and what its operators take by the curves."""
    work = [each for each in operators(spec, forward) if each.kind not in ("norm", "embedding")]
    times = {each.name: each.seconds for each in predicted(work, known, forward)}
    head = times.pop("head")
    seconds = machine.pace.median(call, _bound(work, forward), least=3, patience=2 * PATIENCE)
    return _Run(seconds=seconds, layers=sum(times.values()), head=head)
