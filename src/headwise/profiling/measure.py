"""Measure the curves of a machine: projections, products of heads, attention, and what else layers and models do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from headwise.attention.base import per_head
from headwise.hf.interface import attention_forward
from headwise.hf.linear import take_over_linears
from headwise.measurement.timing import seconds
from headwise.prediction import Curves, Device, Grid, Pass, operators
from headwise.prediction import seconds as predicted
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.progress import Progress, silent

STREAMED = 64 << 20
"""Bytes that are gone through in turn, so that each operand comes from memory, as a model's do."""

MOST_COPIES = 24

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
WEIGHTS = (1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
PRODUCT_TOKENS = (1, 2, 4, 8, 16)
PRODUCT_WEIGHTS = (1 << 15, 1 << 17, 1 << 19)
PROMPTS = (16, 64, 256, 1024, 2048)
CACHED = (256, 1024, 4096)
"""Tokens in the cache of attention that is timed."""

GROUPS = (1, 4, 16)
"""Query heads of each key–value head."""

LATENT_HEADS = (4, 12, 32)
BITS = {0.0: None, 8.5: "int8", 5.0: "int4:32"}
"""Bits of a cached value, its scale included, and the format that has them; 0 for the dtype's own."""

LAYER_TOKENS = (1, 4, 16, 64, 256)
HIDDEN = (128, 768)
_LEAST = 1e-7
"""A difference of times that noise makes negative counts as so many seconds."""


def median_seconds(call: Callable[[], object], *, least: int = 5, patience: float = 0.05) -> float:
    """The median of several calls after one to warm up: ``least`` calls or more, for ``patience`` seconds."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < least or (time.perf_counter() - start < patience and len(times) < 15 * least):
        times.append(seconds(call))
    return statistics.median(times)


@torch.inference_mode()
def measure_curves(dtype: torch.dtype, device: Device, *, progress: Progress = silent) -> Curves:
    """The curves of a dtype on this machine's processor.

    For example ``measure_curves(torch.float32, device("laptop")).linear.at(1, 2**20)``.

    Args:
        dtype: of weights, activations and cache.
        device: any, for what is not measured.
        progress: told of each group of operators.
    """
    stages: list[tuple[str, Callable[[], Grid]]] = [
        ("linear", lambda: _grid(TOKENS, WEIGHTS, partial(_linear, dtype))),
        ("product", lambda: _grid(PRODUCT_TOKENS, PRODUCT_WEIGHTS, partial(_product, dtype))),
        ("prompt", lambda: _prompts(dtype)),
        *((f"core {bits:g}", partial(_cores, dtype, bits)) for bits in BITS),
        *((f"latent core {bits:g}", partial(_latent_cores, dtype, bits)) for bits in (0.0,)),
    ]
    found: dict[str, Grid] = {}
    for index, (name, measure) in enumerate(stages):
        progress("profiling", index, len(stages) + 1)
        found[name] = measure()
    nothing = Grid(x=(1, 2), y=(1, 2), seconds=((_LEAST, _LEAST), (_LEAST, _LEAST)))
    parts = Curves(
        linear=found["linear"],
        product=found["product"],
        prompt=found["prompt"],
        core={bits: found[f"core {bits:g}"] for bits in BITS},
        latent_core={0.0: found["latent core 0"]},
        latent_input=nothing,
        norm=nothing,
        embedding=nothing,
    )
    progress("profiling", len(stages), len(stages) + 1)
    around = _around(parts, dtype, device)
    progress("profiling", len(stages) + 1, len(stages) + 1)
    return replace(parts, norm=around["norm"], embedding=around["embedding"], latent_input=around["latent_input"])


def _grid(x: Sequence[int], y: Sequence[int], measure: Callable[[int, int], float]) -> Grid:
    return Grid(x=tuple(x), y=tuple(y), seconds=tuple(tuple(measure(a, b) for b in y) for a in x))


def _copies(nbytes: float) -> int:
    return int(min(max(STREAMED / nbytes, 2), MOST_COPIES))


def _in_turn(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one of several calls that take turns."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return median_seconds(all_of_them, least=3) / len(calls)


def _linear(dtype: torch.dtype, tokens: int, weights: int) -> float:
    """A projection of tokens, whose weights come from memory."""
    width = 1 << (weights.bit_length() // 2)
    layers = nn.ModuleList(
        nn.Linear(width, weights // width, bias=False).to(dtype)
        for _ in range(_copies(weights * dtype.itemsize) if tokens <= 64 else 2)
    )
    take_over_linears(layers)
    states = torch.randn(1, tokens, width).to(dtype)
    return _in_turn([partial(layer, states) for layer in layers])


def _product(dtype: torch.dtype, tokens: int, weights: int) -> float:
    """A product of each of several heads with a matrix of its own."""
    heads, inner = 8, 64
    matrices = [
        torch.randn(heads, inner, weights // heads // inner).to(dtype)
        for _ in range(_copies(weights * dtype.itemsize))
    ]
    states = torch.randn(tokens, heads, 1, inner).to(dtype)
    return _in_turn([partial(per_head, states, matrix) for matrix in matrices])


def _prompts(dtype: torch.dtype) -> Grid:
    """Attention of prompts to themselves; proportional to FLOPs for one number of new tokens."""
    heads, width = 8, 64
    rows = []
    for tokens in PROMPTS:
        query, key, value = (torch.randn(1, heads, tokens, width).to(dtype) for _ in range(3))
        flops = 2 * heads * 2 * width * tokens * (tokens + 1) / 2
        rate = median_seconds(partial(_attention, query, key, value)) / flops
        rows.append((rate * 1e6, rate * 1e12))
    return Grid(x=PROMPTS, y=(1e6, 1e12), seconds=tuple(rows))


class _Layer(nn.Module):
    is_causal = True


_MODULE = _Layer()


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_forward(_MODULE, query, key, value, None)[0]


def _cores(dtype: torch.dtype, bits: float) -> Grid:
    """Attention of one token to heads, over bytes of cache and FLOPs a byte."""
    heads, width = 4, 64
    value_bytes = bits / 8 or dtype.itemsize
    rows = []
    for tokens in CACHED:
        nbytes = 2 * heads * tokens * width * value_bytes
        rows.append(tuple(_core(dtype, bits, tokens, heads, group, _copies(nbytes)) for group in GROUPS))
    sizes = tuple(2 * heads * tokens * width * value_bytes for tokens in CACHED)
    return Grid(x=sizes, y=tuple(2 * group / value_bytes for group in GROUPS), seconds=tuple(rows))


def _core(dtype: torch.dtype, bits: float, tokens: int, heads: int, group: int, copies: int) -> float:
    decoder = Decoder(num_layers=copies, num_heads=heads * group, num_kv_heads=heads, hidden_size=64 * heads * group)
    stub = _Stub(decoder, dtype)
    cache = filled_cache(stub, decoder.spec(), batch=1, tokens=tokens, quantize=BITS[bits])
    cache.activate_past_recording()
    query = torch.randn(1, heads * group, 1, 64).to(dtype)
    new = torch.randn(1, heads, 1, 64).to(dtype)

    def step(index: int) -> None:
        _attention(query, *cache.update(new, new, index))

    def all_layers() -> None:
        for index in range(copies):
            step(index)
        cache.crop(-1)

    return median_seconds(all_layers, least=3) / copies


class _Stub:
    """What a cache asks of a model, without weights."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        from transformers import AutoConfig

        fields = {name: value for name, value in decoder.config().items() if name != "model_type"}
        self.config = AutoConfig.for_model(str(decoder.config()["model_type"]), **fields)
        self.config._attn_implementation = "headwise"
        self.dtype = dtype

    def modules(self) -> list[nn.Module]:
        """None."""
        return []


def _latent_cores(dtype: torch.dtype, bits: float) -> Grid:
    """Absorbed attention of one token to latents."""
    rank, rope = 192, 32
    rows, sizes = [], []
    for tokens in CACHED:
        nbytes = tokens * (rank + rope) * dtype.itemsize
        sizes.append(float(nbytes))
        latents = [torch.randn(1, 1, tokens, rank + rope).to(dtype) for _ in range(_copies(nbytes))]
        row = []
        for heads in LATENT_HEADS:
            query = torch.randn(1, heads, 1, rank + rope).to(dtype)
            row.append(_in_turn([partial(_to_latents, query, latent, rank) for latent in latents]))
        rows.append(tuple(row))
    flops = tuple(2 * heads * (2 * rank + rope) / (rank + rope) / dtype.itemsize for heads in LATENT_HEADS)
    return Grid(x=tuple(sizes), y=flops, seconds=tuple(rows))


def _to_latents(query: Tensor, latent: Tensor, rank: int) -> Tensor:
    from headwise.kernels import attend

    return attend(query, latent, latent[..., :rank], scale=0.1)


def _around(parts: Curves, dtype: torch.dtype, device: Device) -> dict[str, Grid]:
    """What layers and models do besides: the times of whole decoders less those of their operators."""
    norms: list[list[float]] = [[] for _ in LAYER_TOKENS]
    embeddings: list[list[float]] = [[] for _ in LAYER_TOKENS]
    inputs: list[list[float]] = [[] for _ in LAYER_TOKENS]
    for hidden in HIDDEN:
        plain = Decoder(hidden_size=hidden, num_heads=hidden // 64, intermediate_size=3 * hidden)
        kinds = (plain, replace(plain, latent=(hidden // 4, 32)))
        rest = [_rest([replace(kind, num_layers=n) for n in (2, 5)], parts, dtype, device) for kind in kinds]
        for index, ((layer, body), (with_latent, _)) in enumerate(zip(*rest, strict=True)):
            norms[index].append(max(layer / 2, _LEAST))
            embeddings[index].append(max(body, _LEAST))
            inputs[index].append(max(with_latent - layer, _LEAST))
    rows = {"norm": norms, "embedding": embeddings, "latent_input": inputs}
    return {name: Grid(x=LAYER_TOKENS, y=HIDDEN, seconds=tuple(map(tuple, found))) for name, found in rows.items()}


def _rest(pair: Sequence[Decoder], parts: Curves, dtype: torch.dtype, device: Device) -> list[tuple[float, float]]:
    """For each number of tokens: what is left of a layer's time, and of the model's without its layers."""
    models = [decoder.build(dtype) for decoder in pair]
    name = str(dtype).removeprefix("torch.")
    known = replace(device, curves={name: parts})
    found = []
    for tokens in LAYER_TOKENS:
        is_prompt = tokens > 16
        left = []
        for decoder, model in zip(pair, models, strict=True):
            spec = decoder.spec()
            if is_prompt:
                call: Callable[[], object] = prompt_call(model, tokens)
                forward = Pass(new=tokens, total=tokens, dtype=name)
            else:
                cache = filled_cache(model, spec, batch=tokens, tokens=32)
                call = decode_step(model, cache, tokens)
                forward = Pass(batch=tokens, total=33, dtype=name, impl="absorbed" if decoder.latent else "auto")
            work = [each for each in operators(spec, forward) if each.kind not in ("norm", "embedding")]
            explained = sum(each.seconds for each in predicted(work, known, forward))
            left.append(median_seconds(call) - explained)
        layer = (left[1] - left[0]) / (pair[1].num_layers - pair[0].num_layers)
        found.append((layer, left[0] - pair[0].num_layers * layer))
    return found
