"""The benchmark that the second guide describes: mechanisms of one width, side by side, against the length.

Each mechanism is one layer with random weights. Its output is compared with that of MHA twice: as it was initialised,
on its own, and after MHA's weights were converted to it.

Shapes: B batch, L tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise import cost
from headwise.base.progress import Progress, silent
from headwise.conversion import LayerTarget, convert_to_grouped, convert_to_latent
from headwise.errors import ArgumentError
from headwise.measure.profiling.check import peak_bytes
from headwise.measure.timing.machine import describe_machine, installed_versions
from headwise.measure.timing.timing import time_interleaved
from headwise.models.specs import AttentionSpec, GroupedSpec, LatentSpec, as_latent
from headwise.runtime.attention import build
from headwise.runtime.attention.base import AttentionLayer
from headwise.runtime.hf import as_device, as_dtype
from headwise.study.audit.layers import grouped_layer, latent_space_layer

LENGTHS = (128, 256, 512, 1024)
"""The lengths of the guide's tables, in tokens."""
WARMUPS, PASSES = 30, 100
"""The guide's numbers of passes before timing and of timed passes."""
ALIGNED = "aligned"
"""The method that makes grouped layers of MHA's weights without a text."""


@dataclass(frozen=True)
class Similarity:
    """One output beside another.

    Attributes:
        relative_error: the norm of the difference over the norm of the reference.
        cosine: the cosine between the two outputs, each as one vector.
    """

    relative_error: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class MechanismRow:
    """One mechanism at one length.

    Attributes:
        mechanism: the mechanism's name, such as ``GQA-4``, which has four key–value heads.
        length: the number of tokens of each sequence.
        ms: the median milliseconds of one causal forward pass.
        speedup: MHA's milliseconds over the mechanism's.
        parameters: the number of the layer's parameters.
        cache_bytes: the bytes of the cache of all sequences.
        peak_bytes: the most bytes that tensors made in one pass hold at once, without weights.
        independent: the similarity to MHA's output, both layers initialised on their own.
        converted: the similarity to MHA's output, the layer converted from MHA's weights without a text; None where
            headwise has no such conversion.
    """

    mechanism: str
    length: int
    ms: float
    speedup: float
    parameters: int
    cache_bytes: int
    peak_bytes: int
    independent: Similarity | None
    converted: Similarity | None


@dataclass(frozen=True, kw_only=True)
class MechanismBench:
    """The benchmark's report.

    Attributes:
        hidden_size: E, the width of the layers' input.
        num_heads: the number of query heads.
        batch: B, the number of sequences.
        device: the device that the benchmark ran on.
        dtype: the dtype of weights and hidden states.
        threads: the number of torch's threads on the CPU.
        warmups: the number of passes before those that were timed.
        passes: the number of timed passes of each mechanism; mechanisms took turns.
        rows: the measurements, by length and then by mechanism.
    """

    hidden_size: int
    num_heads: int
    batch: int
    device: str
    dtype: str
    threads: int
    warmups: int
    passes: int
    rows: tuple[MechanismRow, ...]

    def row(self, mechanism: str, length: int) -> MechanismRow:
        """The row of a mechanism and a length."""
        return next(row for row in self.rows if (row.mechanism, row.length) == (mechanism, length))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, with the machine and versions."""
        return {**asdict(self), "machine": describe_machine(), "versions": installed_versions()}


def bench_mechanisms(
    *,
    hidden_size: int = 512,
    num_heads: int = 8,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    passes: int = PASSES,
    progress: Progress = silent,
) -> MechanismBench:
    """Time MHA, MQA, GQA, MLA and latent-space attention, and compare their outputs with MHA's.

    For example ``bench_mechanisms(lengths=[128], passes=10).row("MQA", 128).speedup``.

    Args:
        hidden_size: E, the width of the layers' input; a multiple of twice ``num_heads``.
        num_heads: the number of query heads; a multiple of 2.
        lengths: the numbers of tokens of each sequence.
        batch: B, the number of sequences.
        device: the device to run on.
        dtype: the dtype of weights and hidden states.
        passes: the number of timed passes of each mechanism, after `WARMUPS` others.
        progress: the callback that reports each round.

    Raises:
        ArgumentError: a number is impossible, or torch has no such device or dtype.
    """
    if num_heads < 2 or num_heads % 2 or hidden_size % (2 * num_heads):
        rule = "must be even and at least 2, and hidden_size a multiple of twice as much"
        raise ArgumentError("num_heads", num_heads, rule)
    for name, value in (("batch", batch), ("passes", passes), *(("length", length) for length in lengths)):
        if value < 1:
            raise ArgumentError(name, value, "must be at least 1")
    place, kind = as_device(device), as_dtype(dtype)
    specs = mechanisms(hidden_size, num_heads)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        layers = {name: build(spec).eval() for name, spec in specs.items()}
        derived = {name: _converted(layers["MHA"], spec) for name, spec in specs.items() if name != "MHA"}
        longest = torch.randn(batch, max(lengths), hidden_size)
    for layer in (*layers.values(), *(layer for layer in derived.values() if layer is not None)):
        layer.to(place, kind)
    rows: list[MechanismRow] = []
    with torch.inference_mode():
        for length in lengths:
            states = longest[:, :length].to(place, kind)
            calls = {name: partial(layer, states, is_causal=True) for name, layer in layers.items()}
            times = time_interleaved(
                calls, repeats=passes, warmup=WARMUPS, stage=f"{length} tokens", progress=progress
            )
            outputs = {name: call() for name, call in calls.items()}
            for name, spec in specs.items():
                made = derived.get(name)
                rows.append(
                    MechanismRow(
                        mechanism=name,
                        length=length,
                        ms=1e3 * times[name],
                        speedup=times["MHA"] / times[name],
                        parameters=cost.parameters(spec),
                        cache_bytes=cost.cache_bytes(spec, length, batch=batch, dtype=dtype),
                        peak_bytes=peak_bytes(calls[name], place),
                        independent=None if name == "MHA" else similarity(outputs[name], outputs["MHA"]),
                        converted=None if made is None else similarity(made(states, is_causal=True), outputs["MHA"]),
                    )
                )
    return MechanismBench(
        hidden_size=hidden_size,
        num_heads=num_heads,
        batch=batch,
        device=device,
        dtype=dtype,
        threads=torch.get_num_threads(),
        warmups=WARMUPS,
        passes=passes,
        rows=tuple(rows),
    )


def mechanisms(hidden_size: int, num_heads: int) -> Mapping[str, AttentionSpec]:
    """The layers by name: MHA, MQA, GQA with half and with a quarter of the heads, MLA and latent-space attention.

    Both latents have half of the hidden size. No layer has RoPE, as the guide's have none. For example
    ``list(mechanisms(512, 8))`` is ``["MHA", "MQA", "GQA-4", "GQA-2", "MLA-256", "latent-256"]``.
    """
    heads = (num_heads, 1, *(num_heads // part for part in (2, 4) if num_heads // part > 1 and num_heads % part == 0))
    names = ("MHA", "MQA", *(f"GQA-{count}" for count in heads[2:]))
    half, mha = hidden_size // 2, grouped_layer(hidden_size, num_heads, num_heads)
    return {
        **{name: grouped_layer(hidden_size, num_heads, count) for name, count in zip(names, heads, strict=True)},
        f"MLA-{half}": as_latent(mha, half, 0),
        f"latent-{half}": latent_space_layer(hidden_size, num_heads, half),
    }


def similarity(output: Tensor, reference: Tensor) -> Similarity:
    """One output beside another of the same shape. For example ``similarity(x, x).cosine`` is 1."""
    one, other = output.double().flatten(), reference.double().flatten()
    return Similarity(
        relative_error=float((one - other).norm() / other.norm()),
        cosine=float(torch.nn.functional.cosine_similarity(one, other, dim=0)),
    )


def _converted(mha: AttentionLayer, spec: AttentionSpec) -> AttentionLayer | None:
    """A layer made of MHA's weights alone; None where there is no such conversion."""
    state, source = dict(mha.state_dict()), mha.spec
    assert isinstance(source, GroupedSpec)
    if isinstance(spec, GroupedSpec):
        weights = convert_to_grouped(state, source, spec, method=ALIGNED)
    elif isinstance(spec, LatentSpec):
        weights, _ = convert_to_latent(state, source, LayerTarget(spec), statistics=None)
    else:
        return None
    layer = build(spec).eval()
    layer.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return layer
