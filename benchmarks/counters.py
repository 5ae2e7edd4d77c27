"""Compare FLOP counters on the seven mechanisms: the FLOPs that each reports for a call, and its error.

    python benchmarks/counters.py --json benchmarks/results/counters.json

Every mechanism is one layer of hidden size 512 in float32 with random weights. Prefill is 1024 tokens under the
causal flag; decode is one token after 1023 in the cache. The true FLOPs are those of the layer's matrix products when
the eager reference runs it on the meta device, counted by torch at 2 FLOPs a multiply-add for every pair of tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from headwise import (
    ExpertLatentAttention,
    GroupedQueryAttention,
    LatentSpaceAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    SelfAttention,
    cost,
    count,
)
from headwise.measure.timing import filled_cache
from headwise.runtime.attention import AttentionLayer
from headwise.study.counting import peer_counts

E, TOKENS = 512, 1024
COUNTERS = ("headwise", "thop", "fvcore", "torchinfo", "calflops", "torch")


def layers() -> dict[str, AttentionLayer]:
    torch.manual_seed(0)
    return {
        "single head (S1)": SelfAttention(E, 64, output_projection=True),
        "MHA (S2)": MultiHeadAttention(E, 8),
        "MQA (S3)": MultiQueryAttention(E, 8),
        "GQA (S4)": GroupedQueryAttention(E, 8, 2),
        "MLA (S5)": MultiHeadLatentAttention(
            E, 8, kv_lora_rank=128, q_lora_rank=192, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64
        ),
        "latent-space (S6)": LatentSpaceAttention(E, 8),
        "expert-latent (S7)": ExpertLatentAttention(E, 8, latent_kv_heads=2, kv_dim=64),
    }


def call_of(layer: AttentionLayer, phase: str, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """The arguments of a layer's call: the hidden states of the new tokens, and keywords."""
    if phase == "prefill":
        return torch.randn(1, TOKENS, E, device=device), {"is_causal": True}
    cache = filled_cache(layer.to(device), 1, TOKENS - 1, TOKENS)
    return torch.randn(1, 1, E, device=device), {"is_causal": True, "cache": cache}


def true_flops(layer: AttentionLayer, phase: str) -> int:
    """The FLOPs of all matrix products of the eager reference."""
    layer = layer.to("meta")
    states, kwargs = call_of(layer, phase, "meta")
    backend, layer.backend = layer.backend, "reference"
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(states, **kwargs)
    layer.backend = backend
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    versions: dict[str, str | None] = {}
    for name, layer in layers().items():
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        for phase in ("prefill", "decode"):
            states, kwargs = call_of(layer, phase, "cpu")
            counted = count(layer, states, **kwargs)
            S = states.shape[1]
            if "cache" in kwargs:
                kwargs["cache"].crop(TOKENS - 1)
            peers = peer_counts(layer, states, **kwargs)
            versions |= {peer.name: peer.version for peer in peers}
            answers: dict[str, dict[str, Any]] = {
                peer.name: {"flops": peer.flops, "parameters": peer.parameters, "error": peer.error} for peer in peers
            }
            answers["headwise"] = {
                "flops": cost.forward_flops(layer.spec, S, TOKENS, causal=False),
                "parameters": cost.parameters(layer.spec),
                "error": None,
            }
            answers["headwise.count"] = {
                "flops": counted.forward_flops,
                "parameters": counted.parameters,
                "error": None,
            }
            rows.append({"mechanism": name, "phase": phase, "parameters": parameters, "counters": answers})
    for row, fresh in zip(rows, (layer for layer in layers().values() for _ in range(2)), strict=True):
        row["flops"] = true_flops(fresh, row["phase"])
    print(table(rows))
    if options.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "counters": versions,
            "hidden_size": E,
            "tokens": TOKENS,
            "dtype": "float32",
        }
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the true FLOPs and each counter's error, at 2 FLOPs a multiply-add."""
    lines = [
        f"| | | FLOPs | {' | '.join(COUNTERS)} |",
        f"|---|---|---:|{'---:|' * len(COUNTERS)}",
    ]
    for row in rows:
        cells = [error_text(row["counters"][name]["flops"], row["flops"]) for name in COUNTERS]
        lines.append(f"| {row['mechanism']} | {row['phase']} | {row['flops']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def error_text(flops: int | None, truth: int) -> str:
    if flops is None:
        return "fails"
    return "0" if flops == truth else f"{100 * (flops / truth - 1):+.1f} %"


if __name__ == "__main__":
    main()
