"""Time `attend`'s backends over a grid of shapes, interleaved in one process; medians.

    python benchmarks/attend.py --json benchmarks/results/attend.json

The limit beside each time is the larger of cache bytes over the read bandwidth and FLOPs over the matmul peak, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headwise.kernels import attend, choose_backend
from headwise.measurement import matmul_flops_per_second, time_interleaved

HEADS = ((9, 3, 64), (32, 32, 128), (32, 8, 128), (32, 1, 128))
LENGTHS = (512, 2048, 8192)
QUERIES = (1, 4, 8, 16, 64)
DTYPES = (torch.float32, torch.bfloat16)


def read_bandwidth() -> float:
    """Bytes a second of summing 256 MB."""
    x = torch.ones(64 * 1024**2)
    return x.nbytes / time_interleaved({"sum": x.sum}, repeats=7, warmup=2)["sum"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    bandwidth, flops = read_bandwidth(), {dtype: matmul_flops_per_second(dtype) for dtype in DTYPES}
    rows: list[dict[str, Any]] = []
    peaks = ", ".join(f"{name(dtype)} matmul {rate / 1e9:.0f} GFLOP/s" for dtype, rate in flops.items())
    print(f"read {bandwidth / 1e9:.1f} GB/s, {peaks}, {torch.get_num_threads()} threads")
    print(f"{'':>8} {'heads':>10} {'T':>6} {'S':>3} {'packed':>9} {'sdpa':>9} {'expand':>9} {'limit':>8} ms   auto")
    for dtype, (H, K, D), T in itertools.product(DTYPES, HEADS, LENGTHS):
        k, v = torch.randn(1, K, T, D).to(dtype), torch.randn(1, K, T, D).to(dtype)
        for S in QUERIES:
            q = torch.randn(1, H, S, D).to(dtype)
            calls = {
                "packed": partial(attend, q, k, v, is_causal=True, backend="packed"),
                "sdpa": partial(attend, q, k, v, is_causal=True, backend="sdpa"),
            }
            if S == 1:
                calls["expand"] = partial(expand_then_attend, q, k, v)
            times = time_interleaved(calls, repeats=options.repeats, warmup=2)
            limit = max((k.nbytes + v.nbytes) / bandwidth, 4 * H * S * T * D / flops[dtype])
            auto = choose_backend(q.shape, k.shape).backend
            row = {"dtype": name(dtype), "H": H, "K": K, "D": D, "T": T, "S": S, "limit_s": limit, "auto": auto}
            rows.append({**row, **times})
            shown = " ".join(
                f"{times[n] * 1e3:9.3f}" if n in times else " " * 9 for n in ("packed", "sdpa", "expand")
            )
            print(f"{name(dtype):>8} {f'{H}/{K}/{D}':>10} {T:>6} {S:>3} {shown} {limit * 1e3:8.3f}      {auto}")
    print("\nprefill of unequal widths, S = T: attend pads to one width; torch left alone holds all scores")
    prefill: list[dict[str, Any]] = []
    for dtype, (H, D, V, T) in itertools.product(DTYPES, ((9, 128, 64, 2048), (16, 192, 128, 1024))):
        q, k, v = (torch.randn(1, H, T, width).to(dtype) for width in (D, D, V))
        calls = {
            "attend": partial(attend, q, k, v, is_causal=True, backend="sdpa"),
            "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        }
        times = time_interleaved(calls, repeats=options.repeats, warmup=2)
        prefill.append({"dtype": name(dtype), "H": H, "D": D, "V": V, "T": T, **times})
        shown = f"{times['attend'] * 1e3:9.1f} {times['torch'] * 1e3:9.1f} ms"
        print(f"{name(dtype):>8} {f'{H}/{D}/{V}':>10} {T:>6} {shown}")
    if options.json:
        document = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "read_bytes_per_second": bandwidth,
            "matmul_flops_per_second": {name(dtype): rate for dtype, rate in flops.items()},
            "rows": rows,
            "prefill_of_unequal_widths": prefill,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def expand_then_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The usual way: keys and values repeated to every query head first."""
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


if __name__ == "__main__":
    main()
