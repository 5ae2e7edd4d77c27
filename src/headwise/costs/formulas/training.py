"""Costs of a training step beyond the forward pass: FLOPs of gradients, and activations kept for them."""

from __future__ import annotations

from headwise.costs.formulas.activations import KeptTensor, Training, total_bytes
from headwise.costs.formulas.layer import call_of, chosen_impl, dtype_bytes, formulas, is_causal, stages
from headwise.costs.formulas.stages import Call, Kernel, check_kernel
from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec


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
    kept, call = kept_activations(
        spec, tokens, source_tokens, batch=batch, dtype=dtype, causal=causal, impl=impl, kernel=kernel
    )
    return int(total_bytes(kept, batch=call.batch, new=call.new, total=call.total, value_bytes=dtype_bytes(dtype)))


def kept_activations(
    spec: AttentionSpec,
    tokens: int,
    source_tokens: int | None = None,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    causal: bool | None = None,
    impl: str = "auto",
    kernel: Kernel = "fused",
) -> tuple[tuple[KeptTensor, ...], Call]:
    """The tensors that `activation_bytes` adds up, and the call they belong to; the arguments are the same.

    Raises:
        SpecError: headwise has no such layer, and so no list of its activations.
    """
    cross = source_tokens is not None
    call = call_of(spec, tokens, source_tokens, batch=batch, causal=causal, cross=cross)
    check_kernel(kernel)
    causal = is_causal(spec, causal, cross=cross)
    training = Training(
        kernel=kernel,
        half=dtype_bytes(dtype) < 4,
        causal=causal and tokens > 1,
        window=spec.sliding_window is not None and causal and spec.sliding_window < tokens,
        cross=cross,
        batch_of_one=batch == 1,
    )
    module = formulas(spec)
    if not hasattr(module, "activations"):
        raise SpecError("attention", spec.label, "has no list of its activations: no layer here runs it")
    return module.activations(spec, chosen_impl(spec, impl, call), training), call
