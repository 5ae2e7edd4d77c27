"""Claims about FLOPs and space: C16, C18 to C20."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headwise import cost
from headwise.costs.formulas.stages import Core, Kernel, Linear
from headwise.study.audit.claim import Check, Claim, exact_number, rounded_number
from headwise.study.audit.layers import grouped_layer

SIZES: Mapping[str, int] = MappingProxyType({"batch": 2, "length": 64, "hidden_size": 128, "num_heads": 4})
"""The sizes of the layer that is counted while it runs; closed forms hold at any size."""


def counted_over_formula(batch: int, length: int, hidden_size: int, num_heads: int) -> float:
    """FLOPs counted while a layer of MHA runs, over 6BLE·w + 4BL²·w + 2BLE² with w = E."""
    import torch

    from headwise.runtime.attention import MultiHeadAttention
    from headwise.study.counting import count

    layer = MultiHeadAttention(hidden_size, num_heads).to("meta")
    counted = count(layer, torch.empty(batch, length, hidden_size, device="meta")).forward_flops
    B, L, E = batch, length, hidden_size
    return counted / (6 * B * L * E * E + 4 * B * L**2 * E + 2 * B * L * E**2)


def backward_over_forward(kernel: Kernel, length: int, hidden_size: int, num_heads: int) -> float:
    """FLOPs of MHA's backward pass over those of its forward pass."""
    layer = grouped_layer(hidden_size, num_heads, num_heads)
    return cost.backward_flops(layer, length, kernel=kernel, causal=False) / cost.forward_flops(
        layer, length, causal=False
    )


def softmax_growth(length: int, hidden_size: int, num_heads: int) -> float:
    """The FLOPs of the softmax of twice as many heads over those of ``num_heads``, at the same hidden size."""
    return softmax_flops(length, hidden_size, 2 * num_heads) / softmax_flops(length, hidden_size, num_heads)


def softmax_flops(length: int, hidden_size: int, num_heads: int) -> int:
    """Elementwise FLOPs of MHA's softmax."""
    layer = grouped_layer(hidden_size, num_heads, num_heads)
    return cost.forward_flops(layer, length, softmax=True) - cost.forward_flops(layer, length)


def kv_projection_flops(num_kv_heads: int, batch: int, length: int, hidden_size: int, num_heads: int) -> int:
    """FLOPs of the projections of keys and values."""
    layer = grouped_layer(hidden_size, num_heads, num_kv_heads)
    call = cost.layer.call_of(layer, length, batch=batch)
    stages = (
        stage for stage in cost.stages(layer) if isinstance(stage, Linear) and stage.name in ("k_proj", "v_proj")
    )
    return int(sum(stage.forward_flops(call, "unfused") for stage in stages))


def mqa_projections_over_formula(batch: int, length: int, hidden_size: int, num_heads: int) -> float:
    """FLOPs of MQA's projections of keys and values over 4BLE·w/h with w = E."""
    flops = kv_projection_flops(1, batch, length, hidden_size, num_heads)
    return flops / (4 * batch * length * hidden_size**2 / num_heads)


def width_of_keys(num_kv_heads: int, hidden_size: int, num_heads: int) -> int:
    """The width of all keys of GQA."""
    return cost.cache_values(grouped_layer(hidden_size, num_heads, num_kv_heads)) // 2


def growth_factor(of: str, twice: str, length: int, hidden_size: int, num_heads: int) -> float:
    """A quantity of MHA where one size is doubled, over the same quantity at the given sizes.

    Args:
        of: the quantity: ``scores``, ``weights``, ``scores kept`` (activations of an unfused kernel beyond those of a
            fused one) or ``fused activations``.
        twice: the size that is doubled: ``length``, ``hidden_size`` or ``num_heads``.
        length: n, the number of tokens.
        hidden_size: E, the width of the layer's input.
        num_heads: h, the number of heads.
    """
    sizes = {"length": length, "hidden_size": hidden_size, "num_heads": num_heads}
    return quantity(of, **(sizes | {twice: 2 * sizes[twice]})) / quantity(of, **sizes)


def quantity(of: str, length: int, hidden_size: int, num_heads: int) -> int:
    """A quantity of MHA by its name, see `growth_factor`."""
    layer = grouped_layer(hidden_size, num_heads, num_heads)
    if of == "weights":
        return cost.parameters(layer)
    if of == "scores":
        call = cost.layer.call_of(layer, length, causal=False)
        return int(
            sum(stage.forward_flops(call, "unfused") for stage in cost.stages(layer) if isinstance(stage, Core))
        )
    fused = cost.activation_bytes(layer, length, kernel="fused", causal=False)
    if of == "fused activations":
        return fused
    return cost.activation_bytes(layer, length, kernel="unfused", causal=False) - fused


def _growth(of: str, twice: str, printed: str, when: str = "") -> Check:
    what = {"length": "n", "hidden_size": "E", "num_heads": "h"}[twice]
    return Check(
        states=f"growth of the {of} with twice the {what}",
        when=when,
        printed=rounded_number(printed, suffix=" ×"),
        measure=growth_factor,
        inputs={"of": of, "twice": twice, "length": 8192, "hidden_size": 512, "num_heads": 8},
        unit="×",
    )


CLAIMS = (
    Claim(
        id="C16",
        guide="G3",
        says="self-attention takes 6BLE·w + 4BL²·w + cBL² + 2BLE² FLOPs forwards, and about twice that backwards",
        how="FLOPs counted while a layer runs, and closed forms",
        checks=(
            Check(
                states="counted FLOPs over the formula's products, w = E",
                printed=exact_number(1),
                measure=counted_over_formula,
                inputs=SIZES,
            ),
            Check(
                states="the softmax's growth with twice the heads, cBL² having no h",
                printed=exact_number(1),
                measure=softmax_growth,
                inputs={"length": 1024, "hidden_size": 512, "num_heads": 8},
                unit="×",
            ),
            *(
                Check(
                    states="the backward pass over the forward pass",
                    when=when,
                    printed=rounded_number("2.0"),
                    measure=backward_over_forward,
                    inputs={"kernel": kernel, "length": length, "hidden_size": 512, "num_heads": 8},
                    unit="×",
                )
                for kernel, length, when in (
                    ("unfused", 8192, "scores in memory"),
                    ("fused", 128, "a fused kernel, 128 tokens"),
                    ("fused", 8192, "a fused kernel, 8192 tokens"),
                )
            ),
        ),
    ),
    Claim(
        id="C18",
        guide="G3",
        says="MQA's projections of keys and values take 4BLE·w/h FLOPs; GQA's kv_dim is E/h/g, g key–value heads",
        how="closed forms by stage",
        checks=(
            Check(
                states="MQA's projections over 4BLE·w/h",
                printed=exact_number(1),
                measure=mqa_projections_over_formula,
                inputs=SIZES,
            ),
            Check(
                states="GQA's kv_dim at E = 512, h = 8, g = 4",
                printed=exact_number(512 // 8 // 4),
                measure=width_of_keys,
                inputs={"num_kv_heads": 4, "hidden_size": 512, "num_heads": 8},
            ),
        ),
    ),
    Claim(
        id="C19",
        guide="G5",
        says="the scores take O(n²·E/h), all of it O(n·E² + n²·E/h)",
        how="how the scores' FLOPs grow where one size is doubled",
        checks=(
            _growth("scores", "length", "4.0", "in n"),
            _growth("scores", "hidden_size", "2.0", "in E"),
            _growth("scores", "num_heads", "0.5", "in h: there are h heads of E/h each"),
        ),
    ),
    Claim(
        id="C20",
        guide="G5",
        says="attention needs O(E² + nE + n²h) space",
        how="how weights and what training keeps grow where one size is doubled",
        checks=(
            _growth("weights", "hidden_size", "4.0", "weights in E"),
            _growth("scores kept", "length", "4.0", "scores in memory, in n"),
            _growth("scores kept", "num_heads", "2.0", "scores in memory, in h"),
            _growth("fused activations", "length", "4.0", "a fused kernel, in n: n²h is gone"),
        ),
    ),
)
