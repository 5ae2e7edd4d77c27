"""Measure the curves of a machine: projections, products of heads, attention, and all other work of models."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from headwise.base.progress import Progress, silent
from headwise.costs.formulas.layer import cache_values
from headwise.costs.prediction import MANY, Curves, Device, Grid, Pass, operators
from headwise.costs.prediction import seconds as predicted
from headwise.measure.profiling.decoder import BITS, CPU, Decoder, Grids, decode_step, filled_cache, prompt_call
from headwise.measure.profiling.pace import HERE, Pace, equal_projections, make_in_turn, pass_through, project_in_turn
from headwise.measure.timing.timing import Timeable
from headwise.models.checkpoints import dtype_name
from headwise.models.specs import ModelSpec
from headwise.runtime.attention.base import per_head
from headwise.runtime.hf.interface import attention_forward

PATIENCE = 0.03
"""Seconds for which a call is repeated."""

_WIDEST = 512
"""The widest latent of the decoders that `_measure_other_work` measures."""

_LEAST_FOR_A_BYTE = 1e-13
_LEAST = 1e-7
"""The seconds that a difference of times counts as where noise makes it negative."""

_FROM_MEMORY = 56 << 20
"""A pass that reads at least so many bytes is taken to read from memory, not from the processor's caches."""

_MOST_IN_MODELS = 1.5
"""The largest factor by which projections are taken to be slower or faster in models than on their own."""

_LEAST_SHARE = 0.1
"""The least part of a layer's time that is taken to be other work than its operators."""

_Item = TypeVar("_Item")


class _Machine:
    """A device that is measured in one dtype."""

    def __init__(self, dtype: torch.dtype, known: Device, grids: Grids, place: torch.device) -> None:
        self.dtype, self.known, self.grids, self.place = dtype, known, grids, place
        self.name = dtype_name(dtype)
        self.pace = Pace(dtype, device=place)


def measure_curves(
    dtype: torch.dtype, device: Device, *, grids: Grids = CPU, place: torch.device = HERE, progress: Progress = silent
) -> Curves:
    """The curves of a dtype on this machine's processor, or on its GPU.

    For example ``measure_curves(torch.float32, device("laptop")).many.at(100, 2**20)``.

    Args:
        dtype: the dtype of weights, activations and cache.
        device: a device that the limits are taken from, which curves do not have.
        grids: the sizes to measure at.
        place: the torch device that operators run on.
        progress: the callback that reports each group of operators.
    """
    machine = _Machine(dtype, device, grids, place)
    steps = 7
    progress("profiling", 0, steps)
    few = _measure_few_tokens(machine)
    progress("profiling", 1, steps)
    many = _grid(grids.tokens, grids.weights, partial(_measure_many_tokens, machine))
    product = _grid(grids.product_tokens, grids.product_weights, partial(_measure_products, machine))
    progress("profiling", 2, steps)
    prompt = _measure_prompts(machine)
    progress("profiling", 3, steps)
    core, coded = _measure_attention(machine)
    progress("profiling", 4, steps)
    latent_core, coded_latent_core, coded_latent = _measure_latent_attention(machine)
    progress("profiling", 5, steps)
    nothing = Grid(x=(1, 2), y=(1, 2), seconds=((_LEAST, _LEAST), (_LEAST, _LEAST)))
    parts = Curves(
        few=few,
        many=many,
        product=product,
        prompt=prompt,
        core=core,
        latent_core=latent_core,
        coded_latent_core=coded_latent_core,
        coded=coded,
        coded_latent=coded_latent,
        latent_input=nothing,
        norm=nothing,
        embedding=nothing,
        pace=machine.pace.reference,
    )
    whole = _measure_other_work(machine, parts)
    progress("profiling", 6, steps)
    if grids.few_reads:
        whole = _scale_to_models(machine, whole)
    progress("profiling", steps, steps)
    return whole


def _grid(x: Sequence[int], y: Sequence[int], row: Callable[[int, Sequence[int]], Sequence[float]]) -> Grid:
    return Grid(x=tuple(x), y=tuple(y), seconds=tuple(tuple(row(a, y)) for a in x))


def _measure_few_tokens(machine: _Machine) -> dict[float, Grid]:
    """Seconds of a projection of few tokens by its number of weights, over tokens and the bytes that take turns."""
    grids = machine.grids
    calls, copies = [], []
    for weights in grids.few_weights:
        counts = [max(read // (weights * machine.dtype.itemsize), 1) for read in grids.few_reads]
        layers = equal_projections(machine.dtype, weights, max(counts), machine.place)
        calls += [pass_through(layers[:count], tokens) for tokens in grids.few_tokens for count in counts]
        copies += counts * len(grids.few_tokens)
    times = iter(_seconds_of_one(machine, calls, copies) if calls else ())
    return {
        float(weights): Grid(
            x=grids.few_tokens,
            y=grids.few_reads,
            seconds=tuple(tuple(next(times) for _ in grids.few_reads) for _ in grids.few_tokens),
        )
        for weights in grids.few_weights
    }


def _seconds_of_one(machine: _Machine, calls: Sequence[Timeable], copies: Sequence[int]) -> list[float]:
    """Seconds of one operator, where each call runs a number of equal ones (``copies``)."""
    times = machine.pace.medians(calls, least=3, patience=PATIENCE)
    return [seconds / count for seconds, count in zip(times, copies, strict=True)]


def _measure_many_tokens(machine: _Machine, tokens: int, weights: Sequence[int]) -> list[float]:
    """Seconds of projections of many tokens."""
    copies = [max(machine.grids.turns // (each * machine.dtype.itemsize), 2) for each in weights]
    calls = [
        project_in_turn(machine.dtype, tokens, each, count, machine.place)
        for each, count in zip(weights, copies, strict=True)
    ]
    return _seconds_of_one(machine, calls, copies)


def _measure_products(machine: _Machine, tokens: int, weights: Sequence[int]) -> list[float]:
    """Seconds of products of each of several heads with a matrix of its own."""
    heads, inner = 8, 64
    noise = partial(torch.randn, device=machine.place)
    copies = [max(machine.grids.turns // (each * machine.dtype.itemsize), 8) for each in weights]
    calls = []
    for each, count in zip(weights, copies, strict=True):
        matrices = [noise(heads, inner, each // heads // inner).to(machine.dtype) for _ in range(count)]
        states = noise(tokens, heads, 1, inner).to(machine.dtype)
        calls.append(make_in_turn([partial(per_head, states, matrix) for matrix in matrices]))
    return _seconds_of_one(machine, calls, copies)


def _measure_prompts(machine: _Machine) -> Grid:
    """Seconds of the attention of prompts, over their tokens and the FLOPs for each pair of tokens."""
    grids = machine.grids
    of_a_head = 4 * grids.head_dim

    def call(tokens: int, heads: int) -> Timeable:
        noise = partial(torch.randn, 1, heads, tokens, grids.head_dim, device=machine.place)
        query, key, value = (noise().to(machine.dtype) for _ in range(3))
        return partial(_attention, query, key, value)

    heads = grids.prompt_heads
    times = [machine.pace.medians([call(tokens, count) for count in heads]) for tokens in grids.prompts]
    if len(heads) == 1:  # proportional to it
        heads, times = (1, *heads), [[time / heads[0], time] for (time,) in times]
    y = tuple(count * of_a_head for count in heads)
    return Grid(x=grids.prompts, y=y, seconds=tuple(map(tuple, times)))


class _Causal(nn.Module):
    is_causal = True


_MODULE = _Causal()


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_forward(_MODULE, query, key, value, None)[0]


@dataclass(frozen=True, kw_only=True)
class _Contexts:
    """A decoder, the format of its cache, and the contexts that it decodes after.

    Attributes:
        decoder: the decoder, whose layers are of one kind.
        bits: the bits of a cached value; 0 for the dtype.
        token: the bytes that all layers cache of one token.
        tokens: the number of tokens of each context, without a short one that comes before them.
    """

    decoder: Decoder
    bits: float
    token: float
    tokens: tuple[int, ...]


class _After(NamedTuple):
    """What was measured of a decoder: a layer's seconds after a short context, and how many more after the others."""

    kind: _Contexts
    short: float
    more: list[float]


def _measure_attention(machine: _Machine) -> tuple[dict[float, Grid], dict[float, float]]:
    """Seconds of attention of one token to heads, by the cache's bits, and of a quantising layer's other work."""
    grids = machine.grids
    one = replace(_decoder_with_cache(machine, grids.head_dim * grids.heads), num_heads=grids.heads)
    kinds = [
        _by_bytes(machine, replace(one, num_kv_heads=heads), bits, grids.coded_caches if bits else grids.caches)
        for heads in grids.kv_heads
        for bits in BITS
        if not bits or heads in grids.coded_kv_heads
    ]
    found = _after_contexts(machine, kinds)
    plain = {each.kind.decoder: each.short for each in found if not each.kind.bits}
    core, coded = dict[float, Grid](), dict[float, float]()
    for bits in BITS:
        own = [each for each in found if each.kind.bits == bits]
        core[bits] = _grid_by_bytes(machine, own, grids.coded_caches if bits else grids.caches)
        if bits:
            coded[bits] = max(statistics.median(each.short - plain[each.kind.decoder] for each in own), _LEAST)
    return core, coded


def _measure_latent_attention(machine: _Machine) -> tuple[Grid, dict[float, Grid], dict[float, float]]:
    """Absorbed attention of one token to latents: seconds for each byte in the dtype, seconds of a run in codes by
    their bits, and seconds of a coding layer's other work by bits."""
    grids = machine.grids
    one = replace(_decoder_with_cache(machine, grids.latent_hidden), latent=grids.latent)
    decoders = [replace(one, num_heads=heads) for heads in grids.latent_heads]
    codes = [
        _Contexts(
            decoder=replace(decoder, code_bits=bits),
            bits=bits,
            token=_values_of_token(decoder) * bits / 8,
            tokens=grids.code_tokens,
        )
        for decoder in decoders
        for bits in grids.code_bits
    ]
    found = _after_contexts(machine, [*(_by_bytes(machine, each, 0.0, grids.caches) for each in decoders), *codes])
    plain, of_codes = found[: len(decoders)], found[len(decoders) :]
    shorts = {each.kind.decoder.num_heads: each.short for each in plain}
    values = _values_of_token(one) / one.num_layers
    coded, besides = dict[float, Grid](), dict[float, float]()
    for bits in map(float, grids.code_bits):
        own = [each for each in of_codes if each.kind.bits == bits]
        coded[bits] = Grid(
            x=tuple(tokens * values * bits / 8 for tokens in grids.code_tokens),
            y=tuple(_intensity(machine, each.kind) for each in own),
            seconds=tuple(zip(*([max(seconds, _LEAST) for seconds in each.more] for each in own), strict=True)),
        )
        beyond = statistics.median(each.short - shorts[each.kind.decoder.num_heads] for each in own)
        besides[bits] = max(beyond, _LEAST)
    return _grid_by_bytes(machine, plain, grids.caches), coded, besides


def _decoder_with_cache(machine: _Machine, hidden: int) -> Decoder:
    """A decoder whose networks read enough weights between one layer's cache and the next's."""
    inner = max(_inner_width_between(machine, hidden), 64)
    return Decoder(hidden_size=hidden, num_layers=2, head_dim=machine.grids.head_dim, intermediate_size=inner)


def _inner_width_between(machine: _Machine, hidden: int) -> int:
    """The inner width of the feed-forward network whose weights a layer reads between two caches."""
    return machine.grids.between // (3 * hidden * machine.dtype.itemsize) // 64 * 64


def _values_of_token(decoder: Decoder) -> int:
    """The number of values that a decoder caches for one token."""
    return sum(map(cache_values, decoder.spec().layers))


def _by_bytes(machine: _Machine, decoder: Decoder, bits: float, reads: Sequence[int]) -> _Contexts:
    """Contexts whose caches have given numbers of bytes in all layers."""
    token = _values_of_token(decoder) * (bits / 8 or machine.dtype.itemsize)
    tokens = tuple(max(int(read / token), 2 * machine.grids.short) for read in reads)
    return _Contexts(decoder=decoder, bits=bits, token=token, tokens=tokens)


def _after_contexts(machine: _Machine, kinds: Sequence[_Contexts]) -> list[_After]:
    """A layer's seconds in a decode step after each kind's contexts, measured in turns: their differences count."""
    groups = _groups_in_turn(machine, kinds, lambda kind: replace(kind.decoder, code_bits=None))
    seconds = iter([time for group in groups for time in _steps_after(machine, group)])
    found = []
    for kind in kinds:
        short, *longer = (next(seconds) / kind.decoder.num_layers for _ in (0, *kind.tokens))
        found.append(_After(kind, short, [each - short for each in longer]))
    return found


def _steps_after(machine: _Machine, kinds: Sequence[_Contexts]) -> list[float]:
    """Seconds of decode steps after a short context, and after the others, of one kind after another."""
    models = {kind.decoder: kind.decoder.build(machine.dtype, machine.place) for kind in kinds}
    calls = []
    for kind in kinds:
        model, spec = models[kind.decoder], kind.decoder.spec()
        quantize = None if kind.decoder.code_bits else BITS[kind.bits]
        for tokens in (machine.grids.short, *kind.tokens):
            cache = filled_cache(model, spec, batch=1, tokens=tokens, quantize=quantize)
            calls.append(decode_step(model, cache, 1))
    return machine.pace.medians(calls, patience=4 * PATIENCE)


def _groups_in_turn(
    machine: _Machine, items: Sequence[_Item], decoder_of: Callable[[_Item], Decoder]
) -> list[list[_Item]]:
    """Groups of items to measure in turns: all on a processor, whose pace changes; one decoder's on a GPU, to save
    memory."""
    if machine.grids.few_reads:
        return [list(items)]
    return [list(group) for _, group in groupby(items, decoder_of)]


def _seconds_a_byte(machine: _Machine, kind: _Contexts, more: Sequence[float]) -> list[float]:
    """A layer's seconds for each byte of its cache, from those that contexts take more than a short one."""
    of_a_layer = kind.token / kind.decoder.num_layers
    column = [
        seconds / (tokens - machine.grids.short) / of_a_layer
        for seconds, tokens in zip(more, kind.tokens, strict=True)
    ]
    # Noise may make a difference of times too small, or negative.
    least = max(statistics.median(column) / 2, _LEAST_FOR_A_BYTE)
    return [max(time, least) for time in column]


def _intensity(machine: _Machine, kind: _Contexts) -> float:
    """FLOPs of attention for each byte of a cache."""
    step = Pass(total=1000, dtype=machine.name, cache_bits=kind.bits or None, impl="absorbed")
    work = operators(kind.decoder.spec(), step)
    core = next(each for each in work if each.kind in ("core", "latent core"))
    return core.flops / core.cache_bytes


def _grid_by_bytes(machine: _Machine, found: Sequence[_After], caches: Sequence[int]) -> Grid:
    """Seconds for each byte, over intensities and the bytes that a pass of two layers reads (on a GPU, a run)."""
    x = tuple(caches) if machine.grids.few_reads else tuple(read / 2 for read in caches)
    columns = [_seconds_a_byte(machine, each.kind, each.more) for each in found]
    y = tuple(_intensity(machine, each.kind) for each in found)
    return Grid(x=x, y=y, seconds=tuple(zip(*columns, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A pass of a decoder, and the seconds of its operators by the curves.

    Attributes:
        call: runs the pass.
        layers: the seconds of the layers' operators.
        head: the seconds of the head.
    """

    call: Timeable
    layers: float
    head: float


def _measure_other_work(machine: _Machine, parts: Curves) -> Curves:
    """The curves with all other work of models: the times of whole decoders less those of their operators."""
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
    rest, around = _remaining_times(machine, [*plain, *latent], parts)
    latent_input = {
        (values, one.hidden_size): rest[other, values] - rest[one, values]
        for one, other in zip(plain, latent, strict=True)
        for values in grids.latent_states
    }

    def grid(times: Mapping[tuple[int, int], float], states: Sequence[int] = grids.states) -> Grid:
        def row(values: int, widths: Sequence[int]) -> list[float]:
            return [max(times[values, hidden], _LEAST) for hidden in widths]

        return _grid(states, grids.hidden, row)

    return replace(
        parts,
        norm=grid({(values, one.hidden_size): rest[one, values] / 2 for one in plain for values in grids.states}),
        embedding=grid({(values, one.hidden_size): around[one, values] for one in plain for values in grids.states}),
        latent_input=grid(latent_input, grids.latent_states),
    )


def _scale_to_models(machine: _Machine, whole: Curves) -> Curves:
    """The curves with projections as slow or fast as in whole models: those that read memory, and those of prompts.

    Both are multiplied by a median over several decoders: the time that a pass leaves for its projections, over the
    predicted one. Projections of few tokens mostly take longer in a model, with other work between them during which
    nothing is fetched; those of many tokens take less.
    """
    grids = machine.grids
    passes: list[tuple[ModelSpec, Pass]] = []
    calls: list[Timeable] = []
    for decoder, tokens in zip(grids.models, grids.model_prompts, strict=True):
        model, spec = decoder.build(machine.dtype, machine.place), decoder.spec()
        cache = filled_cache(model, spec, batch=1, tokens=grids.short)
        passes += [
            (spec, Pass(total=grids.short + 1, dtype=machine.name)),
            (spec, Pass(new=tokens, total=tokens, dtype=machine.name)),
        ]
        calls += [decode_step(model, cache, 1), prompt_call(model, tokens)]
    times = machine.pace.medians(calls, least=3, patience=4 * PATIENCE)
    ratios = [
        _projection_ratio(machine, whole, spec, forward, seconds)
        for (spec, forward), seconds in zip(passes, times, strict=True)
    ]
    of_steps, of_prompts = ratios[::2], ratios[1::2]

    def scaled(grid: Grid, ratios: Sequence[float]) -> Grid:
        rows = (tuple(map(operator.mul, row, ratios)) for row in grid.seconds)
        return replace(grid, seconds=tuple(rows))

    of_memory = [_bounded_median(of_steps) if read >= _FROM_MEMORY else 1.0 for read in grids.few_reads]
    few = {weights: scaled(grid, of_memory) for weights, grid in whole.few.items()}
    return replace(whole, few=few, many=scaled(whole.many, [_bounded_median(of_prompts)] * len(grids.weights)))


def _projection_ratio(machine: _Machine, curves: Curves, spec: ModelSpec, forward: Pass, seconds: float) -> float:
    """Seconds of a pass's projections in a model, which takes ``seconds``, divided by those by the curves."""
    work = operators(spec, forward)
    times = predicted(work, replace(machine.known, curves={machine.name: curves}), forward)
    kinds = {each.name: each.kind for each in work}
    linear = sum(each.seconds for each in times if kinds[each.name] == "linear")
    besides = sum(each.seconds for each in times) - linear
    return (seconds - besides) / linear


def _bounded_median(ratios: Sequence[float]) -> float:
    return min(max(statistics.median(ratios), 1 / _MOST_IN_MODELS), _MOST_IN_MODELS)


def _remaining_times(
    machine: _Machine, decoders: Sequence[Decoder], parts: Curves
) -> tuple[dict[tuple[Decoder, int], float], dict[tuple[Decoder, int], float]]:
    """Seconds that operators leave of a layer's time and of the model's around the layers, by decoder and state
    size."""
    rest: dict[tuple[Decoder, int], float] = {}
    around: dict[tuple[Decoder, int], float] = {}
    for together in _groups_in_turn(machine, decoders, lambda decoder: decoder):
        for found, more in zip((rest, around), _remaining_times_in_turn(machine, together, parts), strict=True):
            found.update(more)
    return rest, around


def _remaining_times_in_turn(
    machine: _Machine, decoders: Sequence[Decoder], parts: Curves
) -> tuple[dict[tuple[Decoder, int], float], dict[tuple[Decoder, int], float]]:
    """`_remaining_times` for decoders that are measured in turns."""
    rest, around = {}, {}
    few_layers, many_layers = machine.grids.layers
    passes = {
        (decoder, count): _passes(machine, replace(decoder, num_layers=count), parts)
        for decoder in decoders
        for count in machine.grids.layers
    }
    every = [(*key, values, each) for key, by_values in passes.items() for values, each in by_values.items()]
    times = machine.pace.medians([each.call for *_, each in every], least=3, patience=PATIENCE)
    took = {(decoder, count, values): time for (decoder, count, values, _), time in zip(every, times, strict=True)}
    for decoder in decoders:
        for values, few in passes[decoder, few_layers].items():
            seconds = took[decoder, few_layers, values]
            layer = max(took[decoder, many_layers, values] - seconds, _LEAST) / (many_layers - few_layers)
            known = (passes[decoder, many_layers][values].layers - few.layers) / (many_layers - few_layers)
            # Operators that were measured alone may take more than the layer that they are in.
            rest[decoder, values] = max(layer - known, _LEAST_SHARE * layer)
            around[decoder, values] = seconds - few_layers * layer - few.head
    return rest, around


def _passes(machine: _Machine, decoder: Decoder, parts: Curves) -> dict[int, _Pass]:
    """A decoder's passes by the sizes of their states."""
    states = machine.grids.latent_states if decoder.latent else machine.grids.states
    tokens_of = {values: values // decoder.hidden_size for values in states}
    known = replace(machine.known, curves={machine.name: parts})
    # Passes of few tokens read all weights each time. Those of one layer and of several then have to come from the
    # same place, or their difference is that of the places: small ones lie in the processor's caches.
    one_head = None if decoder.latent else 1
    # A GPU's caches hold nothing that is read again, so there they have to come from its memory.
    inner = max(decoder.hidden_size // 4, _inner_width_between(machine, decoder.hidden_size))
    small = replace(decoder, num_kv_heads=one_head, intermediate_size=inner)
    model, spec = small.build(machine.dtype, machine.place), small.spec()
    found = {}
    for values, tokens in tokens_of.items():
        if tokens < MANY:
            cache = filled_cache(model, spec, batch=tokens, tokens=machine.grids.short)
            impl = "absorbed" if decoder.latent else "auto"
            step = Pass(batch=tokens, total=machine.grids.short + 1, dtype=machine.name, impl=impl)
            found[values] = _time_operators(decode_step(model, cache, tokens), spec, step, known)
    model, spec = decoder.build(machine.dtype, machine.place), decoder.spec()
    for values, tokens in tokens_of.items():
        if tokens >= MANY:
            prompt = Pass(new=tokens, total=tokens, dtype=machine.name)
            found[values] = _time_operators(prompt_call(model, tokens), spec, prompt, known)
    return found


def _time_operators(call: Timeable, spec: ModelSpec, forward: Pass, known: Device) -> _Pass:
    """One pass, with the seconds of its operators by the curves."""
    work = [each for each in operators(spec, forward) if each.kind not in ("norm", "embedding")]
    times = {each.name: each.seconds for each in predicted(work, known, forward)}
    head = times.pop("head")
    return _Pass(call=call, layers=sum(times.values()), head=head)
