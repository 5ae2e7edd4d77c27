"""A model folder written as GGUF the way llama.cpp does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

EPSILON = 1e-6
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(folder: Path, path: Path, kind: str = "F32", architecture: str = "llama") -> None:
    """Write the tiny Llama (or Qwen) as ``F32``, ``F16`` or, where a row has 32 numbers, ``Q8_0``."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(64)
    for full_name, stored in load_file(folder / "model.safetensors").items():
        name, _, part = full_name.rpartition(".")
        tensor: Any = stored
        if name in OUTER:
            target = OUTER[name]
        else:
            _, _, layer, inner = name.split(".", 3)
            target = f"blk.{layer}.{INNER[inner]}"
        if architecture == "llama" and name.endswith(("q_proj", "k_proj")):
            tensor = _permute(tensor, 4 if name.endswith("q_proj") else 2)
        if kind == "Q8_0" and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(
                f"{target}.weight",
                quantize(tensor, GGMLQuantizationType.Q8_0),
                raw_dtype=GGMLQuantizationType.Q8_0,
            )
            continue
        writer.add_tensor(
            f"{target}.{part}", tensor.astype(np.float16) if kind == "F16" and tensor.ndim == 2 else tensor
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permute(weight: Any, heads: int) -> Any:
    """llama.cpp's order of query and key rows: neighbouring pairs where transformers has halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
