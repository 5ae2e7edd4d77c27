"""Parameters, FLOPs, activations, cache and intensity of one attention layer, as closed forms over its spec.

One multiply-add is 2 FLOPs. Symbols: B batch, S new tokens, T all key–value tokens including the new ones.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, cast

from headwise.costs.formulas.activations import KeptTensor, Training
from headwise.costs.formulas.stages import (
    Call,
    Core,
    IndexScores,
    Kernel,
    Linear,
    Product,
    Size,
    Stage,
    WeightsInMemory,
    attended_pairs,
    check_kernel,
    held_stage,
)
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs.base import AttentionSpec, mechanism_module
from headwise.models.specs.model import Formats

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
DTYPE_BYTES |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 1)
"""Bytes of one value of each dtype, by torch's name."""


class Formulas(Protocol):
    """The interface of a mechanism's module ``headwise.costs.formulas.<kind>``.

    A module has some functions only where they apply: ``best_impl`` (several implementations), ``shard`` (heads can
    be split over ranks), ``activations`` (headwise has the layer) and ``state_values`` (a state of constant size).
    """

    IMPLS: tuple[str, ...]

    def stages(self, spec: AttentionSpec, impl: str, new_tokens: int) -> tuple[Stage, ...]:
        """The work of one layer, in order."""

    def best_impl(self, spec: AttentionSpec, new_tokens: int, total_tokens: int, pairs: int) -> str:
        """The implementation with the fewest FLOPs."""

    def cache_values(self, spec: AttentionSpec) -> Size:
        """Values cached for one token."""

    def activations(self, spec: AttentionSpec, impl: str, training: Training) -> tuple[KeptTensor, ...]:
        """The tensors that one layer keeps for the backward pass."""

    def shard(self, spec: AttentionSpec, ranks: int) -> AttentionSpec:
        """The part of the layer that one of several tensor-parallel ranks holds."""


def formulas(spec: AttentionSpec) -> Formulas:
    """The module of formulas for a spec's mechanism.

    For example ``formulas(layer_spec("llama-3-8b")).__name__`` is ``"headwise.costs.formulas.grouped"``.
    """
    return cast(Formulas, mechanism_module("costs.formulas", spec.kind))


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of a dtype, given by torch's name.

    For example ``dtype_bytes("bfloat16")`` is 2.

    Raises:
        ArgumentError: the name is not known.
    """
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ArgumentError("dtype", dtype, f"must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def stages(spec: AttentionSpec, impl: str | None = None, *, new_tokens: int = 1) -> tuple[Stage, ...]:
    """The stages of a layer under an implementation (the mechanism's first when None).

    For example ``stages(layer_spec("llama-3-8b"))[0].name`` is ``"q_proj"``.

    Raises:
        ArgumentError: the mechanism has no such implementation.
    """
    module = formulas(spec)
    return module.stages(spec, _check_impl(spec, impl or module.IMPLS[0]), new_tokens)


def _check_impl(spec: AttentionSpec, impl: str) -> str:
    """The name of an implementation, which the mechanism has; else raise an `ArgumentError`."""
    names = formulas(spec).IMPLS
    if impl not in names:
        raise ArgumentError("impl", impl, f"must be one of {', '.join(names)} for {spec.mechanism}")
    return impl


def parameters(spec: AttentionSpec) -> int:
    """The number of learned parameters of one layer: weights, biases, norms.

    For example ``parameters(layer_spec("llama-3-8b"))`` is 41,943,040.
    """
    return int(sum(stage.parameters for stage in stages(spec)))


def held_weights(spec: AttentionSpec, formats: Formats = (), vector_bytes: float | None = None) -> WeightsInMemory:
    """The weights of one layer's attention in memory.

    For example ``held_weights(layer_spec("llama-3-8b")).values`` is 41,943,040.

    Args:
        spec: the spec of the layer.
        formats: the formats of its quantised matrices, by the names of their stages.
        vector_bytes: bytes of one value of norms and biases; None where these are in the dtype.
    """
    own = dict(formats)
    return sum((held_stage(stage, own.get(stage.name), vector_bytes) for stage in stages(spec)), WeightsInMemory())


def forward_flops(
    spec: AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    impl: str = "auto",
    kernel: Kernel = "unfused",
    softmax: bool = False,
    batch: int = 1,
    causal: bool | None = None,
    cross: bool = False,
    cached: bool = False,
) -> int:
    """FLOPs of one forward pass of one layer: its matrix products, and the softmax when asked for.

    Args:
        spec: the spec of the layer.
        new_tokens: S, tokens passed in; 1 for a decode step.
        total_tokens: T, tokens attended to; S when None (prefill). S of them are new, unless ``cross``.
        impl: one of the mechanism's implementations, or ``auto`` for the one with the fewest FLOPs.
        kernel: one of `headwise.cost.KERNELS`; in the forward pass only ``padded`` makes a difference.
        softmax: whether ``SOFTMAX_FLOPS`` are added for each score.
        batch: B, the number of sequences.
        causal: True counts only the pairs that the causal mask (and the window) leaves; False counts all S·T, as
            kernels do that skip nothing; None follows the spec.
        cross: whether the T tokens are another sequence's, whose keys and values are computed too.
        cached: whether the cache holds those keys and values already; only with ``cross``.

    Raises:
        ArgumentError: a count is impossible, or the implementation or kernel is not known.

    >>> layer = headwise.GroupedSpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    >>> forward_flops(layer, 1, 1000, batch=2)
    561152
    """
    call = call_of(spec, new_tokens, total_tokens, batch=batch, causal=causal, cross=cross, cached=cached)
    check_kernel(kernel)
    work = stages(spec, chosen_impl(spec, impl, call), new_tokens=new_tokens)
    flops = sum(stage.forward_flops(call, kernel) for stage in work)
    return int(flops + (sum(s.softmax_flops(call) for s in work if isinstance(s, Core)) if softmax else 0))


def prefill_flops(
    spec: AttentionSpec, tokens: int, *, chunk: int | None = None, batch: int = 1, causal: bool | None = None
) -> int:
    """FLOPs of reading a prompt, at once or in chunks that each attend to all tokens before them.

    For example ``prefill_flops(layer_spec("llama-3-8b"), 2048)`` is 206,175,207,424.

    Chunks cost as much as one pass, except where every chunk decodes the cached latents again.

    Args:
        spec: the spec of the layer.
        tokens: tokens of the prompt.
        chunk: tokens of a chunk; None reads the whole prompt at once.
        batch: B, the number of prompts.
        causal: True counts only the pairs that the causal mask leaves, False all; see `forward_flops`.
    """
    check_whole_number("tokens", tokens, 1)
    size = tokens if chunk is None else chunk
    check_whole_number("chunk", size, 1)
    ends = [*range(size, tokens, size), tokens]
    parts = pairwise([0, *ends])
    return sum(forward_flops(spec, end - start, end, batch=batch, causal=causal) for start, end in parts)


def decode_flops(spec: AttentionSpec, context: int, new_tokens: int = 1, *, batch: int = 1) -> int:
    """FLOPs of generating ``new_tokens`` one by one after a context, each counted at its own length.

    For example ``decode_flops(layer_spec("llama-3-8b"), 8192)`` is 218,120,192.

    The first of them attends to ``context`` tokens and itself.
    """
    check_whole_number("context", context, 0)
    check_whole_number("new_tokens", new_tokens, 1)
    lengths = range(context + 1, context + new_tokens + 1)
    return sum(forward_flops(spec, 1, length, batch=batch, causal=spec.is_causal) for length in lengths)


def backward_flops(
    spec: AttentionSpec,
    tokens: int,
    source_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
    impl: str = "auto",
    kernel: Kernel = "fused",
    input_gradient: bool = True,
) -> int:
    """FLOPs of the backward pass of a training step, twice those of the forward pass for an unfused kernel.

    For example ``backward_flops(layer_spec("llama-3-8b"), 2048)`` is 429,538,672,640.

    A fused kernel computes the scores again: five products where the forward pass has two.

    Args:
        spec: the spec of the layer.
        tokens: S, the number of tokens passed in.
        source_tokens: T, tokens of the other sequence in cross-attention; None for self-attention.
        batch: B, the number of sequences.
        causal: True counts only the pairs that the causal mask leaves, False all; see `forward_flops`.
        impl: the implementation, see `forward_flops`.
        kernel: one of `headwise.cost.KERNELS`.
        input_gradient: False where the layer's inputs need no gradient, as in a model's first layer: the gradient of
            the projections' inputs is then not computed.
    """
    cross = source_tokens is not None
    call = call_of(spec, tokens, source_tokens, batch=batch, causal=causal, cross=cross)
    check_kernel(kernel)
    work = stages(spec, chosen_impl(spec, impl, call), new_tokens=tokens)
    return int(sum(stage.backward_flops(call, kernel, input_gradient=input_gradient) for stage in work))


def activation_bytes(
    spec: AttentionSpec,
    tokens: int,
    source_tokens: int | None = None,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    causal: bool | None = None,
    impl: str = "auto",
    kernel: Kernel = "fused",
) -> int:
    """Bytes that a training step keeps of one layer's forward pass until its backward pass, without dropout.

    For example ``activation_bytes(layer_spec("llama-3-8b"), 2048)`` is 76,283,904.

    Every tensor that autograd saves is counted, the layer's input among them, but not its parameters. The number is
    exact for two tokens or more: tensors of a single token are contiguous in any order, and need fewer copies.

    Args:
        spec: the spec of the layer.
        tokens: S, the number of tokens passed in.
        source_tokens: T, tokens of the other sequence in cross-attention; None for self-attention.
        batch: B, the number of sequences.
        dtype: the dtype of weights and activations.
        causal: True counts only the pairs that the causal mask leaves, False all; see `forward_flops`.
        impl: the implementation, see `forward_flops`.
        kernel: one of `headwise.cost.KERNELS`; ``unfused`` holds the scores at least in float32.
    """
    cross = source_tokens is not None
    call = call_of(spec, tokens, source_tokens, batch=batch, causal=causal, cross=cross)
    kept = kept_activations(spec, call, cross=cross, dtype=dtype, causal=causal, impl=impl, kernel=kernel)
    return int(sum(tensor.nbytes(call, Size(dtype_bytes(dtype))) for tensor in kept))


def kept_activations(
    spec: AttentionSpec, call: Call, *, cross: bool, dtype: str, causal: bool | None, impl: str, kernel: Kernel
) -> tuple[KeptTensor, ...]:
    """The tensors that `activation_bytes` adds up for a call; the other arguments are the same.

    Raises:
        SpecError: headwise has no such layer, and so no list of its activations.
    """
    check_kernel(kernel)
    causal, window = is_causal(spec, causal, cross=cross), spec.sliding_window
    training = Training(
        kernel=kernel,
        half=dtype_bytes(dtype) < 4,
        causal=causal and call.new > 1,
        window=window is not None and causal and window < call.new,
        cross=cross,
        batch_of_one=call.batch == 1,
    )
    module = formulas(spec)
    if not hasattr(module, "activations"):
        raise SpecError("attention", spec.label, "has no list of its activations: no layer here runs it")
    return module.activations(spec, chosen_impl(spec, impl, call), training)


def call_of(
    spec: AttentionSpec,
    new_tokens: int,
    total_tokens: int | None = None,
    *,
    batch: int = 1,
    causal: bool | None = None,
    cross: bool = False,
    cached: bool = False,
) -> Call:
    """The sizes of one forward pass, each with its formula; the arguments are those of `forward_flops`."""
    S, T = new_tokens, new_tokens if total_tokens is None else total_tokens
    check_whole_number("new_tokens", S)
    check_whole_number("total_tokens", T)
    check_whole_number("batch", batch, 1)
    if S < 1 or (1 if cross else S) > T:
        name, value = ("total_tokens", T) if cross and S >= 1 else ("new_tokens", S)
        rule = "must be at least 1" if cross else f"must be from 1 to total_tokens = {T}"
        raise ArgumentError(name, value, rule)
    if causal not in (None, True, False):
        raise ArgumentError("causal", causal, "must be True, False or None")
    if cross and spec.sliding_window is not None:
        raise ArgumentError("cross", cross, "is not for a layer with a sliding window, which attends to its own past")
    if cached and not cross:
        raise ArgumentError("cached", cached, "is for cross-attention only; elsewhere total_tokens tells it")
    causal = is_causal(spec, causal, cross=cross)
    if causal and S > T:
        raise ArgumentError("causal", causal, f"must be false for {S} queries of {T} source tokens")
    new = Size(S, "S")
    total = new if T == S and not cross else Size(T, "T")
    window = None if cross else spec.sliding_window
    if spec.chunked and window is not None and window <= T - S:
        total = new + Size((T - S) % window, "c")  # no token sees those of an earlier chunk
    elif window is not None and not spec.chunked and S + window - 1 < T:
        total = new + Size(window, "w") - 1  # the cache has forgotten the rest
    return Call(
        batch=Size(batch, "B"),
        new=new,
        source=(Size(0) if cached else total) if cross else new,
        total=total,
        pairs=_pairs(new, total, window if causal else None, causal=causal, chunked=spec.chunked),
    )


def is_causal(spec: AttentionSpec, causal: bool | None, *, cross: bool) -> bool:
    """Whether a call is causal: as ``causal`` says, or when None as the spec says, which cross-attention ignores."""
    return (spec.is_causal and not cross) if causal is None else causal


def _pairs(new: Size, total: Size, window: int | None, *, causal: bool, chunked: bool) -> Size:
    """`headwise.cost.attended_pairs` as a size with its formula."""
    if not causal or (int(new) == 1 and window is None):
        return new * total
    past = Size(0) if total is new else total - new
    if chunked and window is not None and total > window:
        return Size(attended_pairs(int(new), int(total), causal=True, window=window, chunked=True), "in chunks")
    if window is None or (window >= total and past + 1 < window):
        return new * past + (new * (new + 1)).halved()
    w = Size(window, "w")
    if past + 1 >= window:
        return new * w
    return w * new - ((w - past) * (w - past - 1)).halved()


def check_whole_number(name: str, value: int, least: int | None = None) -> None:
    """Raise an `ArgumentError` unless ``value`` is a whole number (of at least ``least``)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(name, value, "must be a whole number")
    if least is not None and value < least:
        raise ArgumentError(name, value, f"must be at least {least}")


def chosen_impl(spec: AttentionSpec, impl: str, call: Call) -> str:
    """The implementation that is used: the one named, or for ``auto`` the one with the fewest FLOPs.

    Raises:
        ArgumentError: the mechanism has no such implementation.
    """
    module = formulas(spec)
    if impl != "auto":
        return _check_impl(spec, impl)
    if len(module.IMPLS) == 1:
        return module.IMPLS[0]
    return module.best_impl(spec, int(call.new), int(call.total), int(call.pairs))


def thop_count(spec: AttentionSpec, tokens: int, *, batch: int = 1) -> int:
    """The number that thop prints as "FLOPs": multiply-adds of the linear layers, without those of attention.

    For example ``thop_count(layer_spec("llama-3-8b"), 1)`` is 41,943,040.
    """
    call = call_of(spec, tokens, batch=batch)
    work = stages(spec, new_tokens=tokens)
    return sum(stage.forward_flops(call, "unfused") for stage in work if isinstance(stage, Linear)) // 2


def shard(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    """The part of a layer that one of ``ranks`` tensor-parallel ranks holds, as a spec whose costs are one rank's.

    For example ``shard(layer_spec("llama-3-8b"), 4).label`` is ``"GQA 8/2 × 128"``.

    Query heads are split; key–value heads too, until a rank has one; every rank holds the whole MLA latent.

    Raises:
        ArgumentError: the heads cannot be split over so many ranks.
    """
    check_whole_number("ranks", ranks, 1)
    module = formulas(spec)
    if ranks == 1:
        return spec
    if not hasattr(module, "shard"):
        raise ArgumentError("ranks", ranks, f"must be 1: {spec.mechanism} attention is not split by heads")
    return module.shard(spec, ranks)


def cache_values(spec: AttentionSpec) -> int:
    """The number of values that one token adds to the cache of one layer.

    For example ``cache_values(layer_spec("llama-3-8b"))`` is 2,048.
    """
    return int(formulas(spec).cache_values(spec))


def cache_bytes_per_token(spec: AttentionSpec, dtype: str = "bfloat16") -> int:
    """Bytes that one more token adds to the cache of one layer while it grows; 0 for an encoder.

    For example ``cache_bytes_per_token(layer_spec("llama-3-8b"))`` is 4,096.
    """
    return cache_values(spec) * dtype_bytes(dtype) if spec.is_causal else 0


def cache_bytes(spec: AttentionSpec, tokens: int, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of one layer's cache at a context of ``tokens``; a sliding window holds no more than its width.

    For example ``cache_bytes(layer_spec("llama-3-8b"), 8192)`` is 33,554,432.
    """
    check_whole_number("tokens", tokens, 0)
    check_whole_number("batch", batch, 1)
    grown = held_tokens(spec, tokens) * cache_bytes_per_token(spec, dtype)
    return batch * grown + state_bytes(spec, batch=batch, dtype=dtype)


def held_tokens(spec: AttentionSpec, tokens: int) -> int:
    """The number of ``tokens`` that stay in a layer's cache: all, or at most its window."""
    return tokens if spec.sliding_window is None else min(tokens, spec.sliding_window)


def state_bytes(spec: AttentionSpec, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of one layer's cache that do not grow with tokens: 0 but for mechanisms that have ``state_values``.

    For example ``state_bytes(layer_spec("jamba-v0.1"))`` is 327,680, the state of a Mamba layer.
    """
    values = getattr(formulas(spec), "state_values", None)
    return 0 if values is None else batch * int(values(spec)) * dtype_bytes(dtype)


def decode_intensity(spec: AttentionSpec, *, dtype: str = "bfloat16", new_tokens: int = 1) -> float:
    """FLOPs for each byte of cache read in the limit of a long cache, by the implementation with the fewest FLOPs.

    For example ``decode_intensity(layer_spec("llama-3-8b"))`` is 4.0.

    With e bytes a value it is ``2(H/K)S/e`` for GQA, and ``2HS(2R+P)/((R+P)e)`` for absorbed MLA.

    Raises:
        SpecError: the layer's cache does not grow.
    """
    module = formulas(spec)
    if not cache_values(spec):
        raise SpecError("attention", spec.label, "has no cache that grows, and so no intensity of reading it")
    S, long = new_tokens, 1_000_000 * new_tokens
    reading = Call(batch=Size(1), new=Size(S), source=Size(S), total=Size(long), pairs=Size(S * long))
    impl = chosen_impl(spec, "auto", reading)
    # Work that one more cached token adds: its pairs, unless as many as before are selected, and where the latent is
    # expanded its decoding.
    stages = module.stages(spec, impl, S)
    more = max(stage.rate or 1 if isinstance(stage, Core | IndexScores) else 1 for stage in stages)
    call = Call(batch=Size(1), new=Size(S), source=Size(0), total=Size(more), pairs=Size(S * more))
    flops = sum(
        stage.forward_flops(call, "unfused")
        for stage in stages
        if isinstance(stage, IndexScores)
        or (isinstance(stage, Core) and stage.most is None)
        or (isinstance(stage, Linear | Product) and stage.over == "total")
    )
    return flops / (more * cache_values(spec) * dtype_bytes(dtype))
