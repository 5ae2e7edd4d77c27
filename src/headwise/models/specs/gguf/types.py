"""GGML's types of tensors, and the bytes of the tensors of a GGUF file.

Source: ggml (type_traits), and the gguf package's ``GGML_QUANT_SIZES``, to which a test holds the table.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from headwise.models.specs.gguf.header import GgufHeader, GgufTensor
from headwise.models.specs.weights.stored import MatrixFormat, StoredWeights

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""The name of each type, the values of a block, and its bytes."""

_ATTENTION = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    "attn_output": ("o_proj",),
    "attn_q_a": ("q_a_proj",),
    "attn_q_b": ("q_b_proj",),
    "attn_kv_a_mqa": ("kv_a_proj_with_mqa",),
    "attn_kv_b": ("kv_b_proj",),
    "attn_k_b": ("kv_b_proj",),
    "attn_v_b": ("kv_b_proj",),
}
_PARTS = {"": "feed_forward", "_exps": "experts", "_shexp": "shared_experts"}
_STAGES = {
    **_ATTENTION,
    "ffn_gate_inp": ("router router",),
    **{
        f"ffn_{name}{suffix}": (f"{part} {name}_proj",)
        for suffix, part in _PARTS.items()
        for name in ("gate", "up", "down")
    },
}
"""The stages of `headwise.cost` that a tensor of a layer holds."""


def tensor_bytes(tensor: GgufTensor) -> int | None:
    """Bytes of a tensor; None where its type is not known.

    For example ``tensor_bytes(GgufTensor("output.weight", (2, 32), 8, 0))`` is 68.
    """
    if tensor.ggml_type not in TYPES:
        return None
    _, values, size = TYPES[tensor.ggml_type]
    return math.prod(tensor.shape) // values * size


def gguf_weights(header: GgufHeader, num_layers: int) -> StoredWeights:
    """The formats of all weights in a GGUF file, by the types of its tensors.

    For example ``gguf_weights(header, 30).scheme`` is ``"GGUF Q4_1, Q8_0, F32"``, the type of most bytes first.

    Args:
        header: the header of the file.
        num_layers: the number of the model's layers.
    """
    layers: list[dict[str, list[GgufTensor]]] = [defaultdict(list) for _ in range(num_layers)]
    vectors = []
    for name, tensor in header.tensors.items():
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if len(tensor.shape) == 1:
            vectors.append(tensor)
        elif found and int(found[1]) < num_layers:
            for stage in _STAGES.get(found[2], ()):
                layers[int(found[1])][stage].append(tensor)
    for layer in layers:  # a fused tensor that holds the gate as well
        if "feed_forward up_proj" in layer:
            layer.setdefault("feed_forward gate_proj", layer["feed_forward up_proj"])
    outside = {"embedding": header.tensors.get("token_embd.weight"), "head": header.tensors.get("output.weight")}
    unknown = sorted({each.ggml_type for each in header.tensors.values()} - TYPES.keys())
    bytes_of_vectors = sum(tensor_bytes(each) or 0 for each in vectors)
    return StoredWeights.of_layers(
        f"GGUF {', '.join(_names(list(header.tensors.values())))}",
        [{stage: form for stage, found in layer.items() if (form := _format(found))} for layer in layers],
        {name: form for name, tensor in outside.items() if tensor and (form := _format([tensor]))},
        vector_bytes=bytes_of_vectors / sum(math.prod(each.shape) for each in vectors) if vectors else 4,
        is_bound=bool(unknown),
        notes=tuple(f"ggml type {number} is not known" for number in unknown),
    )


def _names(tensors: Sequence[GgufTensor]) -> list[str]:
    """The types of tensors, that of most bytes first."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if (size := tensor_bytes(tensor)) is not None:
            sizes[TYPES[tensor.ggml_type][0]] += size
    return sorted(sizes, key=lambda name: -sizes[name])


def _format(tensors: Sequence[GgufTensor]) -> MatrixFormat | None:
    """The format of a matrix that some tensors hold together; None where a type is not known."""
    sizes = [tensor_bytes(each) for each in tensors]
    values = sum(math.prod(each.shape) for each in tensors)
    if not values or any(size is None for size in sizes):
        return None
    return MatrixFormat(name="+".join(_names(tensors)), bits=8 * sum(size or 0 for size in sizes) / values)
