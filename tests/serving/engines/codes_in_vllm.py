"""What vLLM stores and computes of a folder in codes, beside the definition; run by the interpreter of vLLM.

    VLLM_PYTHON codes_in_vllm.py FOLDER

Reads a prompt in parts, decodes some tokens, and prints as JSON how many tokens every layer was given, whether the
bytes in its pages are the codes of those tokens, and how far its outputs are from attention in float64 to what the
bytes stand for, as a fraction of the largest.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import vllm
from torch import Tensor

from headwise_vllm.attention import Batch, CodedAttention, LatentAttention, PagedAttention

PROMPT, NEW, PART = 90, 20, 40

Step = tuple[Tensor, Tensor, Tensor, Tensor]
"""The queries, states, output and block table of one call of a layer."""


def watch(kind: Any, steps: dict[PagedAttention, list[Step]]) -> None:
    """Keep what the layers of a class are given, and return."""
    own = kind.store_and_attend

    def watched(layer: PagedAttention, query: Tensor, states: Tensor, batch: Batch) -> Tensor:
        out: Tensor = own(layer, query, states, batch)
        if len(batch.requests) == 1:
            steps[layer].append(tuple(x.clone() for x in (query, states, out, batch.block_table)))  # type: ignore[arg-type]
        return out

    kind.store_and_attend = watched


def rotated(keys: Tensor, layer: Any) -> Tensor:
    """Keys ``[T, …, P]`` rotated by their slots, in float64."""
    rotation = layer.coded.rotation
    shape = (len(keys), *(1,) * (keys.dim() - 2), -1)
    cos, sin = (table[: len(keys), rotation.frequency].double().view(shape) for table in (rotation.cos, rotation.sin))
    first, second = keys.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def keys_and_values(layer: Any, stored: Tensor) -> tuple[Tensor, Tensor, float]:
    """Every query head's keys ``[H, T, D]`` and values ``[H, T, V]``, and the scale, of stored values ``[T, W]``."""
    coded = layer.coded
    if isinstance(layer, LatentAttention):
        R, decoders = coded.rank, layer.decoders()
        latents = stored[:, :R]
        keys = torch.einsum("tr,hnr->htn", latents, decoders.keys.double())
        values = torch.einsum("tr,hvr->htv", latents, decoders.values.double())
        if decoders.key_bias is not None:
            keys, values = keys + decoders.key_bias[:, None], values + decoders.value_bias[:, None]
        shared = rotated(stored[:, R:], layer).expand(len(keys), -1, -1)
        return torch.cat((keys, shared), -1), values, layer.layer.scale
    K, group = coded.heads, layer.group
    keys, values = (part.unflatten(-1, (K, -1)) for part in stored.split(K * coded.head_dim, -1))
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (rotated(keys, layer), values))
    return keys, values, layer.scale


def check(layer: Any, steps: list[Step]) -> dict[str, Any]:
    """How a layer's bytes and outputs compare."""
    code, states = layer.coded.code, torch.cat([step[1] for step in steps])
    T, pages = len(states), steps[-1][3][0].long()
    is_first = torch.arange(T) == 0
    codes = code.encode(states, is_first)
    rows = layer.kv_cache[pages[: -(-T // layer.kv_cache.shape[2])], 0].flatten(0, 1)
    is_equal = torch.equal(rows[:T], codes)
    stored = code.decode(codes, torch.float64, is_first)
    layer.group = steps[0][0].shape[1] // getattr(layer.coded, "heads", 1)
    keys, values, scale = keys_and_values(layer, stored)
    window = (layer.layer if isinstance(layer, LatentAttention) else layer).window or T
    worst, begin = 0.0, 0
    for query, _, out, _ in steps:
        end = begin + len(query)
        scores = scale * query.double().transpose(0, 1) @ keys[:, :end].mT
        ahead = torch.arange(begin, end)[:, None] - torch.arange(end)  # how far a query's token is of another
        hidden = (ahead < 0) | (ahead >= window)
        expected = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, :end]).transpose(0, 1)
        worst = max(worst, float((out - expected).abs().max() / expected.abs().max()))
        begin = end
    return {"tokens": T, "equal": is_equal, "difference": worst}


def main() -> None:
    """Serve, and compare."""
    model = vllm.LLM(
        model=sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=1, max_num_batched_tokens=PART,
        block_size=32, enforce_eager=True, skip_tokenizer_init=True, compilation_config={"custom_ops": ["none"]},
    )  # fmt: skip
    steps: dict[PagedAttention, list[Step]] = defaultdict(list)
    for kind in (LatentAttention, CodedAttention):
        watch(kind, steps)
    options = vllm.SamplingParams(temperature=0, max_tokens=NEW + 1, ignore_eos=True, detokenize=False)
    ids = [3 + 7 * at % 300 for at in range(PROMPT)]
    model.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
    print(json.dumps([check(layer, kept) for layer, kept in steps.items()]), flush=True)


if __name__ == "__main__":
    main()
