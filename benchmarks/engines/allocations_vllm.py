"""What vLLM's own functions say that a request of a length takes of its cache, for lists of layers.

    python allocations_vllm.py MODEL_FOLDER '[[["full", null, 2, 64], ["window", 512, 2, 64]], 9000, "bfloat16"]'

Any model's folder serves: the layers are those that are named. JSON on the last line of stdout.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the folder is a toy's

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec


def main() -> None:
    found = []
    for layers, length, dtype in json.loads(sys.argv[2]):
        settings = EngineArgs(
            model=sys.argv[1],
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=length,
            max_num_batched_tokens=8192,
            block_size=16,
            dtype="float32",
            async_scheduling=False,
        ).create_engine_config()
        settings.cache_config.kv_cache_layout = "LBNHC"  # the engine settles it: layers outermost, as on CPUs
        specs = {}
        for index, (kind, window, heads, width) in enumerate(layers):
            sizes = {"block_size": 16, "num_kv_heads": heads, "head_size": width, "dtype": getattr(torch, dtype)}
            if kind == "latent":
                specs[f"layer {index}"] = MLAAttentionSpec(**sizes)
            elif window is None:
                specs[f"layer {index}"] = FullAttentionSpec(**sizes)
            else:
                specs[f"layer {index}"] = SlidingWindowSpec(sliding_window=window, **sizes)
        groups = get_kv_cache_groups(settings, specs)
        widest = max(len(group.layer_names) for group in groups)
        taken = 0
        for group in groups:
            spec = group.kv_cache_spec
            blocks = -(-spec.max_memory_usage_bytes(settings) // spec.page_size_bytes)
            # A group of layers of several widths adds up their pages itself.
            pages = 1 if hasattr(spec, "kv_cache_specs") else widest
            taken += blocks * spec.page_size_bytes * pages
        found.append(taken)
    print(json.dumps({"bytes": found, "version": f"vllm {vllm.__version__}"}))


main()
