"""Measurements that ``headwise bench`` does not make.

Layers of large models; the parts of a token's time in a small model; the memory of a prompt; whether an optimised
model generates the same tokens; the quality of an int8 cache; the backends that ``auto`` chooses; a batch of unequal
lengths.

    python -m benchmarks.speed --json benchmarks/results/speed.json

Each row is saved as soon as it is measured.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.data import wikitext
from benchmarks.kept import Kept, say
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import headwise
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.measure.timing.machine import Probes
from headwise.measure.timing.timing import spread_interleaved, time_call
from headwise.runtime.hf import HeadwiseCache
from headwise.runtime.hf.linears import FewTokensLinear
from headwise.runtime.kernels import attend

LAYERS = 4
MODELS = {
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_key_value_heads": 32},
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8},
}


@torch.inference_mode()
def layers(name: str, context: int, rounds: int) -> dict[str, Any]:
    """Time a token in four layers of a large model's shape in bfloat16, and in their attention and linear layers."""
    config = LlamaConfig(
        **MODELS[name], num_attention_heads=32, num_hidden_layers=LAYERS, vocab_size=64, max_position_embeddings=32768
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = headwise.optimize(model.to_empty(device="cpu").eval())
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    cache = HeadwiseCache(model, max_length=context + 8)
    K, D = config.num_key_value_heads, config.head_dim
    model.model.rotary_emb.inv_freq.copy_(1e4 ** (-torch.arange(0, D, 2) / D))
    for layer in range(LAYERS):
        cache.update(*(torch.randn(1, K, context, D, dtype=torch.bfloat16) for _ in range(2)), layer)
    return {"layers": LAYERS, **parts(model, cache, rounds)}


@torch.inference_mode()
def small(context: int, rounds: int) -> dict[str, Any]:
    """Time a token of the bundled model in float32, which takes mostly Python besides attention and linear layers."""
    model = headwise.optimize(headwise.load("smollm2-135m", dtype="float32").eval())
    cache = HeadwiseCache(model, max_length=context + 8)
    model(torch.randint(5, 40000, (1, context)), past_key_values=cache, logits_to_keep=1)
    return parts(model, cache, rounds)


def parts(model: Any, cache: HeadwiseCache, rounds: int) -> dict[str, Any]:
    """Time one more token of an optimised model, and its attention and its linear layers alone, in turn."""
    config, dtype, context = model.config, model.dtype, cache.get_seq_length()
    linears = [module for module in model.modules() if isinstance(module, FewTokensLinear)]
    inputs = [torch.randn(1, 1, module.in_features, dtype=dtype) for module in linears]
    query = torch.randn(1, config.num_attention_heads, 1, config.head_dim, dtype=dtype)
    cached = [(layer.keys, layer.values) for layer in cache.layers]
    probes = Probes(dtype)

    def step() -> None:
        model(torch.tensor([[5]]), past_key_values=cache)

    def attention() -> None:
        for key, value in cached:
            attend(query, key, value)

    def products() -> None:
        for module, x in zip(linears, inputs, strict=True):
            module(x)

    calls: dict[str, Callable[[], object]] = {
        "token": step,
        "attention": attention,
        "linear": products,
        **probes.calls(),
    }
    times: dict[str, list[float]] = {call: [] for call in calls}
    cache.activate_past_recording()
    for _ in range(rounds + 3):
        for call in random.sample(list(calls), len(calls)):
            times[call].append(time_call(calls[call]))
        cache.crop(-1)
    median = {call: statistics.median(values[3:]) for call, values in times.items()}
    bandwidth = probes.limits(median["read"], median["product"]).bytes_per_second
    weights = sum(module.weight.nbytes for module in linears)
    cache_bytes = sum(key.nbytes + value.nbytes for key, value in cached)
    return {
        "context": context,
        "read_bytes_per_second": bandwidth,
        "weights_bytes": weights,
        "cache_bytes": cache_bytes,
        **{f"{call}_ms": median[call] * 1e3 for call in ("token", "attention", "linear")},
        "token_of_limit": median["token"] * bandwidth / (weights + cache_bytes),
        "attention_of_limit": median["attention"] * bandwidth / cache_bytes,
        "linear_of_limit": median["linear"] * bandwidth / weights,
    }


def memory(way: str, tokens: int, kv_heads: int, dtype: str) -> dict[str, Any]:
    """Measure seconds and peak memory of attention over a prompt, in a separate process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_memory, (way, tokens, kv_heads, dtype))


def _memory(way: str, tokens: int, kv_heads: int, dtype: str) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    query, key, value = (torch.randn(1, heads, tokens, 128, dtype=kind) for heads in (32, kv_heads, kv_heads))
    grouped = kv_heads != 32
    calls = {
        "headwise": partial(attend, query, key, value, is_causal=True),
        "headwise, left padding": partial(
            attend, query, key, value, (torch.arange(tokens) >= 100)[None], is_causal=True
        ),
        "SDPA": partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=grouped),
    }
    few = slice(0, 64)
    attend(query[:, :, few], key[:, :, few], value[:, :, few], is_causal=True)  # compiles the kernel
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    with torch.inference_mode():
        duration = time_call(calls[way])
    extra = _status("VmHWM") - before
    return {
        "tokens": tokens,
        "kv_heads": kv_heads,
        "dtype": dtype,
        "seconds": duration,
        "peak_bytes_beyond_inputs": extra,
        "peak_bytes_beyond_inputs_and_output": extra - query.nbytes,
    }


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@torch.inference_mode()
def greedy(context: int, new: int) -> dict[str, Any]:
    """Compare greedy tokens of an optimised model with the stock model's, after a prompt of real text."""
    from headwise.models.checkpoints import load_tokenizer, model_path, tokenize

    stock = headwise.load("smollm2-135m", dtype="float32").eval()
    optimized = headwise.optimize(headwise.load("smollm2-135m", dtype="float32").eval())
    text = Path(torch.__file__).with_name("functional.py").read_text(encoding="utf-8")
    ids = tokenize(load_tokenizer(model_path("smollm2-135m")), text, return_tensors="pt")["input_ids"][:, :context]
    runs = [(stock, DynamicCache(config=stock.config)), (optimized, HeadwiseCache(optimized))]
    logits = [model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1] for model, cache in runs]
    for index in range(new):
        first, second = (int(row.argmax()) for row in logits)
        top = logits[0].float().topk(2).values
        if first != second:
            return {"context": context, "same_tokens": index, "gap_at_first_difference": float(top[0] - top[1])}
        token = torch.tensor([[first]])
        logits = [model(token, past_key_values=cache).logits[0, -1] for model, cache in runs]
    return {"context": context, "same_tokens": new}


@torch.inference_mode()
def int8(windows: int, prompt: int, length: int, step: int) -> dict[str, Any]:
    """Score WikiText-2 by the bundled model, some tokens at a time after a prompt, with a plain and an int8 cache."""
    from headwise.models.checkpoints import load_tokenizer, model_path, tokenize

    model = headwise.optimize(headwise.load("smollm2-135m", dtype="float32").eval())
    text = wikitext("test").read_text(encoding="utf-8")[: 8 * windows * length]
    ids = tokenize(load_tokenizer(model_path("smollm2-135m")), text, return_tensors="pt")["input_ids"]
    loss = {"float32": 0.0, "int8": 0.0}
    divergence, agreements, count = 0.0, 0, 0
    for window in range(windows):
        tokens = ids[:, window * length : (window + 1) * length]
        caches = {"float32": HeadwiseCache(model), "int8": HeadwiseCache(model, quantize="int8")}
        for cache in caches.values():
            model(tokens[:, :prompt], past_key_values=cache, logits_to_keep=1)
        for start in range(prompt, length - 1, step):
            piece, targets = tokens[:, start : start + step], tokens[0, start + 1 : start + 1 + step]
            logs = {}
            for name, cache in caches.items():
                logs[name] = model(piece, past_key_values=cache).logits[0, : len(targets)].double().log_softmax(-1)
                loss[name] -= float(logs[name].gather(-1, targets[:, None]).sum())
            divergence += float(kl_divergence(logs["float32"], logs["int8"]).sum())
            agreements += int((logs["float32"].argmax(-1) == logs["int8"].argmax(-1)).sum())
            count += len(targets)
    perplexity = {name: math.exp(total / count) for name, total in loss.items()}
    return {
        "text": "wikitext-2 test",
        "tokens": count,
        "perplexity": perplexity,
        "ratio": perplexity["int8"] / perplexity["float32"],
        "kl_nats": divergence / count,
        "top1_agreement": agreements / count,
    }


@torch.inference_mode()
def dispatch() -> dict[str, Any]:
    """Compare ``auto`` with the best single backend over new tokens, lengths, heads and dtypes."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        for H, K, D, V in (
            (9, 3, 64, 64),
            (32, 32, 128, 128),
            (32, 8, 128, 128),
            (32, 1, 128, 128),
            (16, 1, 576, 512),
        ):
            for S, T in ((1, 64), (1, 512), (1, 8192), (4, 2048), (8, 512), (16, 2048), (64, 64), (512, 2048)):
                sizes = (H, S, D), (K, T, D), (K, T, V)
                query, key, value = (torch.randn(1, *size).to(dtype) for size in sizes)
                ways: dict[str, Callable[[], object]] = {
                    backend: partial(attend, query, key, value, is_causal=True, backend=backend)  # type: ignore[arg-type]
                    for backend in ("auto", "fused", "packed", "sdpa")
                }
                times = spread_interleaved(ways, budget=1.0)
                ms = {name: spread.median * 1e3 for name, spread in times.items()}
                best = min(ms[name] for name in ways if name != "auto")
                shape = f"{H}/{K}/{D if D == V else f'{D}, {V}'}, {S} new of {T}, {str(dtype).removeprefix('torch.')}"
                cases.append(
                    {"shape": shape, "ms": ms, "auto_of_best": ms["auto"] / best, "behind_ms": ms["auto"] - best}
                )
    worst = max(cases, key=lambda case: case["auto_of_best"])
    return {
        "worst": worst["shape"],
        "auto_of_best": worst["auto_of_best"],
        "behind_ms": worst["behind_ms"],
        "cases": cases,
    }


@torch.inference_mode()
def unequal(longest: int, shortest: int, batch: int) -> dict[str, Any]:
    """Time a batch of one long row and short ones, one row of as many tokens, and a batch of long rows."""
    query, key, value = (torch.randn(batch, heads, n, 128) for heads, n in ((32, 1), (8, longest), (8, longest)))
    lengths = torch.tensor([longest, *[shortest] * (batch - 1)])
    padding = torch.arange(longest) >= longest - lengths[:, None]
    tokens = int(lengths.sum())
    one = [torch.randn(1, heads, n, 128) for heads, n in ((32, 1), (8, tokens), (8, tokens))]
    times = spread_interleaved(
        {
            "unequal": partial(attend, query, key, value, padding),
            "one row of as many tokens": partial(attend, *one),
            "all as long as the longest": partial(attend, query, key, value),
        },
        budget=10.0,
    )
    return {"lengths": lengths.tolist(), **{f"{name}, ms": spread.median * 1e3 for name, spread in times.items()}}


def main() -> None:
    """Measure the rows that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=16384)
    options = parser.parse_args()
    kept = Kept(options.json, {"rounds": options.rounds, "context": options.context})
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        f"layers: {name}": partial(layers, name, options.context, options.rounds) for name in MODELS
    }
    for context in (64, 8000):
        rows[f"a token: smollm2-135m, {context}"] = partial(small, context, options.rounds)
    for kv_heads in (32, 8):
        for dtype in ("float32", "bfloat16"):
            for way in ("headwise", "headwise, left padding", "SDPA"):
                row = partial(memory, way, options.context, kv_heads, dtype)
                rows[f"prompt: {way}, 32/{kv_heads}/128, {dtype}"] = row
    rows["greedy: 256 tokens after 64"] = partial(greedy, 64, 256)
    rows["greedy: 256 tokens after 2000"] = partial(greedy, 2000, 256)
    rows["int8 cache: WikiText-2"] = partial(int8, 12, 256, 1024, 32)
    rows["auto beside single backends"] = dispatch
    rows["a batch of unequal lengths"] = partial(unequal, options.context, 512, 8)
    for name, measure in rows.items():
        if name not in kept.rows:
            kept.add(name, measure())
            say(name, {key: value for key, value in kept.rows[name].items() if key != "run"})


if __name__ == "__main__":
    main()
