"""headwise's plugin for vLLM: attention to a paged cache beside headwise's own layer, and what it reads of a config.

`benchmarks.engines` runs vLLM itself with it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headwise_vllm.config import LatentLayer, latent_layers
from headwise_vllm.paged import Decoders, Request, attend, attend_to_latents, store
from hypothesis import given
from hypothesis import strategies as st

import headwise
from headwise.attention import MultiHeadLatentAttention
from headwise.engines import rules
from tests.tiny_families import save_family

H, E, BLOCK = 3, 24, 4


def layer_of(rank: int, nope: int, rope: int, bias: Any, window: int | None) -> MultiHeadLatentAttention:
    layer = MultiHeadLatentAttention(
        E,
        H,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=5,
        latent_norm=False,
        bias=bias,
        sliding_window=window,
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4)
    return layer


def decoders_of(layer: MultiHeadLatentAttention) -> Decoders:
    keys, values = layer._decoders()
    if layer.kv_b_proj.bias is None:
        return Decoders(keys, values)
    biases = layer.kv_b_proj.bias.unflatten(0, (H, -1))
    return Decoders(keys, values, *biases.split_with_sizes((keys.shape[1], values.shape[1]), dim=1))


@given(
    rank=st.sampled_from([1, 7, 16]),
    nope=st.sampled_from([0, 6]),
    rope=st.sampled_from([0, 4]),
    bias=st.sampled_from([False, True]),
    window=st.sampled_from([None, 1, 3]),
    lengths=st.lists(st.tuples(st.integers(1, 11), st.integers(0, 11)), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
@torch.no_grad()
def test_a_batch_of_requests(
    rank: int,
    nope: int,
    rope: int,
    bias: bool,
    window: int | None,
    lengths: list[tuple[int, int]],
    seed: int,
) -> None:
    """Requests of any number of new and former tokens, in blocks anywhere, as headwise's layer computes each."""
    if not nope + rope:
        return
    torch.manual_seed(seed)
    layer = layer_of(rank, nope, rope, bias, window)
    # Poisoned: whatever is read of other requests' blocks, or behind a request's end, shows.
    cache = torch.full((40, 1, BLOCK, rank + rope), float("nan"), dtype=torch.float64)
    blocks = torch.randperm(40)
    table = torch.full((len(lengths), 8), -1)
    queries, expected, requests, used, begin = [], [], [], 0, 0
    for at, (new, former) in enumerate(lengths):
        T = new + former
        states = torch.randn(1, T, E, dtype=torch.float64)
        positions = torch.arange(T)
        rotation = None if layer.rope is None else layer.rope(positions[None], torch.float64, T)
        (latents,) = layer._states_to_cache(states, rotation)
        count = -(-T // BLOCK)
        table[at, :count] = blocks[used : used + count]
        used += count
        slots = table[at, positions // BLOCK] * BLOCK + positions % BLOCK
        store(cache, latents[0, 0], slots)
        q_nope, q_rope = layer._queries(states, rotation)
        queries.append(torch.cat((q_nope, q_rope), -1)[0].transpose(0, 1)[former:])
        expected.append(layer(states, is_causal=True)[0, former:])
        requests.append(Request(begin, begin + new, T))
        begin += new
    out = attend(torch.cat(queries), cache, table, requests, decoders_of(layer), scale=layer._scale(), window=window)
    torch.testing.assert_close(layer.o_proj(out.flatten(1)), torch.cat(expected), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_both_ways_are_the_same() -> None:
    torch.manual_seed(0)
    layer = layer_of(16, 6, 4, True, None)
    decoders, latents = decoders_of(layer), torch.randn(9, 20, dtype=torch.float64)
    query = torch.randn(9, H, 10, dtype=torch.float64)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    both = attend_to_latents(query, latents, decoders, seen, scale=0.3)
    one_by_one = [attend_to_latents(query[t : t + 1], latents[: t + 1], decoders, None, scale=0.3) for t in range(9)]
    torch.testing.assert_close(both, torch.cat(one_by_one))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plugin")
    headwise.convert(
        save_family(root / "source", "qwen2"),
        root / "own",
        to="mla",
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        evaluate=False,
    )
    return root / "own"


def section(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config["headwise"]


def test_layers_of_a_folder(folder: Path) -> None:
    layers = latent_layers(section(folder), 2)
    assert all(isinstance(layer, LatentLayer) for layer in layers)
    assert {(layer.kv_lora_rank, layer.qk_rope_head_dim, len(layer.channels)) for layer in layers} == {(16, 8, 4)}
    assert "kv_a_proj_with_mqa" in layers[0].biases


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"format": 2}, "headwise.format = 2: must be 1"),
        ({"rope_channels": None}, "must tell of 2 layers"),
        ({"rope_channels": [[0], [0]]}, "headwise.rope_channels of layer 0: 1: must be 4"),
        ({"kind": "grouped"}, "headwise.attention of layer 0: kind = 'grouped': must be latent"),
        ({"qk_norm": "head"}, "qk_norm = 'head': is not served in vLLM"),
        ({"latent_norm": True}, "latent_norm = True: is not served in vLLM"),
    ],
    ids=str,
)
def test_a_folder_that_is_not_served(folder: Path, change: dict[str, Any], rule: str) -> None:
    described = copy.deepcopy(section(folder))
    for name, value in change.items():
        (described if name in ("format", "rope_channels") else described["attention"][0])[name] = value
    with pytest.raises(ValueError, match=r"headwise\.") as error:
        latent_layers(described, 2)
    assert rule in str(error.value)


def test_what_headwise_engines_says_is_what_the_plugin_registers() -> None:
    import headwise_vllm

    assert rules.PLUGIN_FAMILIES == headwise_vllm.FAMILIES
