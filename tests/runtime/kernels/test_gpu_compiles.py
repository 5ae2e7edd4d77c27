"""The GPU kernels as machine code, which Triton makes without a GPU: the interpreter does not check types."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise.runtime.quantization.groups import packed_bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, constants, pointers, *architectures in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(module), name)
    kinds = {argument: "i32" for argument in kernel.arg_names} | {"scale": "fp32"} | pointers
    signature = {argument: "constexpr" if argument in constants else kinds[argument] for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    for architecture in architectures or [80]:
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        print(len(made.asm["cubin"]))
"""
"""Run without the interpreter; prints the bytes of each kernel for an A100, or for the GPUs that are named."""

TRELLIS = "headwise.runtime.kernels.gpu.trellis_kernels"
POINTERS = {"key": "*u8", "value": "*u8", "block_scales": "*fp16", "mask": "*i1"}


def of_codes(dtype: str, bits: tuple[int, int], groups: tuple[int, int], block: int, has_mask: bool) -> list[Any]:
    """A kernel for heads of 64 channels."""
    constants = {"D": 64, "V": 64, "MAIN": 64, "WIDTH": 64, "ROWS": 16, "TOKENS": 32, "BLOCK": block}
    constants |= {"HAS_MASK": has_mask, "CAUSAL": has_mask, "WIDEN": False}
    for name, width, count in zip(("KEY", "VALUE"), bits, groups, strict=True):
        size = packed_bytes(64, width)
        constants |= {f"{name}_BITS": width, f"{name}_BYTES": size, f"{name}_ROW": size + 4 * count}
        constants |= {f"{name}_COUNT": count, f"{name}_GROUPS": max(count, 1), f"{name}_ALIGN": 4}
    pointers = POINTERS | {"query": f"*{dtype}", "mixtures": "*fp32", "weights": "*fp32"}
    return ["headwise.runtime.kernels.gpu.kernels", "attend_part_of_codes", constants, pointers]


def of_trellis(dtype: str, *, heads: bool) -> list[Any]:
    """The kernel for latents of 48 channels and a rotary key of 16, or for heads of 64 in pages."""
    constants = {"CONTENT": 32 if heads else 48, "HALF": 16 if heads else 8, "V": 64 if heads else 48}
    constants |= {"SHARED": not heads, "TURN": 64, "SINKS": 4, "ROW": 33, "PAGE": 256 if heads else 0}
    constants |= {"ROWS": 16, "TOKENS": 16, "MAIN": 32 if heads else 64, "PAIRS": 16, "WIDTH": 64}
    constants |= {"HAS_CONTENT": True, "HAS_MASK": not heads, "CAUSAL": True, "WIDEN": False}
    names = ["gains", "scales", "offsets", "turn", "cos", "sin", "mixtures", "weights"]
    pointers = dict.fromkeys(names, "*fp32") | dict.fromkeys(["ends", "bits", "frequency"], "*i32")
    pointers |= dict.fromkeys(["lengths", "blocks"], "*i32" if heads else "*i64")
    pointers |= {
        "query": f"*{dtype}",
        "codes": "*u8",
        "wide": "*bf16",
        "first": "*i64",
        "mask": "*i1",
        "tables": "*i8",
    }
    return [TRELLIS, "attend_part_of_trellis", constants, pointers, *((80, 90) if heads else ())]


def of_decoder() -> list[Any]:
    """The kernel that decodes tokens, for an A100 and an H100."""
    pointers = dict.fromkeys(("gains", "scales", "offsets"), "*fp32") | dict.fromkeys(("ends", "bits"), "*i32")
    pointers |= {"codes": "*u8", "places": "*i64", "out": "*bf16", "tables": "*i8"}
    return [TRELLIS, "decode_tokens", {"PART": 48, "TOKENS": 16, "WIDTH": 64}, pointers, 80, 90]


def of_wide(name: str, constants: dict[str, Any], *tensors: str) -> list[Any]:
    """A kernel for bfloat16."""
    pointers = dict.fromkeys(tensors, "*bf16") | {"mixtures": "*fp32", "weights": "*fp32", "mask": "*i1"}
    return ["headwise.runtime.kernels.gpu.kernels", name, constants, pointers]


def of_encoder() -> list[Any]:
    """The kernel that chooses codes, for an A100 and an H100."""
    pointers = dict.fromkeys(("values", "squares", "tables"), "*fp32")
    pointers |= dict.fromkeys(("bits", "starts", "sources", "windows"), "*u8")
    return [TRELLIS, "walk_trellis", {}, pointers, 80, 90]


def of_narrow() -> list[Any]:
    """The kernel for float32 heads of less than 16 channels, in products of parts."""
    constants = {"ROWS": 16, "TOKENS": 32, "MAIN": 16, "REST": 0, "WIDTH": 16, "HAS_MASK": False, "CAUSAL": True}
    constants |= {"SHARED": False, "WIDEN": False, "NARROW": True, "PRECISION": "tf32x3"}
    pointers = dict.fromkeys(("query", "key", "value", "mixtures", "weights"), "*fp32") | {"mask": "*i1"}
    return ["headwise.runtime.kernels.gpu.kernels", "attend_part", constants, pointers]


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    wide = {"ROWS": 16, "TOKENS": 32, "MAIN": 64, "REST": 16, "WIDTH": 64, "HAS_MASK": True, "CAUSAL": True}
    kernels = [
        of_wide(
            "attend_part",
            wide | {"SHARED": False, "WIDEN": False, "NARROW": False, "PRECISION": "ieee"},
            "query",
            "key",
            "value",
        ),
        of_narrow(),
        of_wide("join_parts", {"WIDTH": 64, "PARTS": 8, "SOME": 4}, "out"),
        of_codes("bf16", (8, 4), (1, 2), 0, False),
        of_codes("fp32", (3, 2), (2, 1), 0, True),
        of_trellis("bf16", heads=False),
        of_trellis("fp32", heads=False),
        of_trellis("bf16", heads=True),
        of_decoder(),
        of_codes("fp16", (2, 3), (0, 2), 32, True),
        of_encoder(),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(kernels)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [int(size) > 0 for size in done.stdout.split()] == [True] * (len(kernels) + 3)
