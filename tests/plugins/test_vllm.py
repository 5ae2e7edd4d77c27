"""headwise's plugin for vLLM: attention to a paged cache beside headwise's own layer, and what it reads of a config.

`benchmarks.engines` runs vLLM itself with it.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise
import headwise_vllm
from headwise.models.families import family_names, family_of
from headwise.runtime.attention import MultiHeadLatentAttention
from headwise.runtime.quantization.transform_code import FILE
from headwise.serving.engines import rules
from headwise_vllm.config import CODE_FILE, CODED, FAMILIES, ROPES, LatentLayer, latent_layers, register_configs
from headwise_vllm.paged import Decoders, Request, _absorbed, _expanded, attend, attend_to_latents, store
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
@example(rank=7, nope=6, rope=4, bias=True, window=None, lengths=[(1, 5), (1, 6), (2, 4), (1, 9)], seed=0)
@example(rank=7, nope=6, rope=4, bias=True, window=3, lengths=[(1, 5), (1, 0), (1, 9)], seed=0)
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
    options = {"window": None, "scale": 0.3}
    both = attend_to_latents(query, latents, decoders, **options)
    one_by_one = [attend_to_latents(query[t : t + 1], latents[: t + 1], decoders, **options) for t in range(9)]
    torch.testing.assert_close(both, torch.cat(one_by_one))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 30, 700])
@pytest.mark.parametrize(("new", "former"), [(1, 1029), (1030, 0), (600, 430), (3, 1000)])
def test_long_requests_are_attended_to_in_parts(
    new: int, former: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens divided among threads, and queries that share a mask, as the definition has them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.manual_seed(0)
    layer = layer_of(16, 6, 4, True, None)
    decoders, T = decoders_of(layer), new + former
    latents, query = (torch.randn(*shape, dtype=torch.float64) for shape in ((T, 20), (new, H, 10)))
    keys = torch.einsum("tr,hnr->htn", latents[:, :16], decoders.keys) + decoders.key_bias[:, None]
    values = torch.einsum("tr,hvr->htv", latents[:, :16], decoders.values) + decoders.value_bias[:, None]
    keys = torch.cat((keys, latents[None, :, 16:].expand(H, -1, -1)), -1)
    distance = torch.arange(former, T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    scores = (0.3 * query.transpose(0, 1) @ keys.mT).masked_fill(hidden, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1)
    torch.testing.assert_close(attend_to_latents(query, latents, decoders, window=window, scale=0.3), expected)
    for way in (_absorbed, _expanded):
        torch.testing.assert_close(way(query, latents, decoders, window, 0.3), expected)


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
    layers = latent_layers(section(folder), 2, 32)
    assert all(isinstance(layer, LatentLayer) for layer in layers)
    assert {(layer.kv_lora_rank, layer.qk_rope_head_dim, len(layer.channels)) for layer in layers} == {(16, 8, 4)}
    assert "kv_a_proj_with_mqa" in layers[0].biases


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"format": 2}, "headwise.format = 2: must be 1"),
        ({"rope_channels": None}, "must tell of 2 layers"),
        ({"rope_channels": [[0], [0]]}, "headwise.rope_channels of layer 0: 1: must be 4"),
        ({"rope_channels": [[0, 1, 2, -1]] * 2}, "headwise.rope_channels of layer 0: must be from 0 to 31"),
        ({"is_causal": False}, "is_causal = False: must be true"),
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
        latent_layers(described, 2, 32)
    assert rule in str(error.value)


def test_what_headwise_engines_says_is_what_the_plugin_serves() -> None:
    families = tuple(name for name in family_names() if family_of(name).deepseek_blocks)
    assert (families, rules.PLUGIN_ROPES) == (FAMILIES, ROPES)
    stock = tuple(name.removesuffix("ForCausalLM").lower() for name in CODED)
    assert (stock, CODE_FILE) == (rules.PLUGIN_CODED, FILE)


def test_a_config_reaches_another_process(folder: Path, tmp_path: Path) -> None:
    """vLLM unpickles it there before it calls plugins."""
    plugin = str(Path(headwise_vllm.__file__).parents[1])
    register = "from headwise_vllm.config import register_configs; register_configs()"
    read = f"import pickle, sys; sys.path.insert(0, {plugin!r})"
    pickled = str(tmp_path / "config.pickle")
    save = (
        f"{read}; {register}; from transformers import AutoConfig; "
        f"pickle.dump(AutoConfig.from_pretrained({str(folder)!r}), open({pickled!r}, 'wb'))"
    )
    load = (
        f"{read}; config = pickle.load(open({pickled!r}, 'rb')); print(config.model_type, config.headwise['format'])"
    )
    subprocess.run([sys.executable, "-c", save], check=True)
    done = subprocess.run([sys.executable, "-c", load], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["headwise_qwen2", "1"]


def test_headwise_keeps_its_own_config_classes() -> None:
    import headwise.hf  # registers them

    assert headwise.hf
    register_configs()
    assert CONFIG_MAPPING["headwise_qwen2"].__module__.startswith("headwise.runtime.hf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [1, 7])
@torch.no_grad()
def test_in_16_bits_scores_are_not_rounded(dtype: torch.dtype, new: int) -> None:
    """Large scores, as large biases of queries and keys give, in the dtypes that models are served in."""
    torch.manual_seed(0)
    layer = layer_of(16, 6, 4, False, None)
    exact = decoders_of(layer)
    rounded = Decoders(exact.keys.to(dtype), exact.values.to(dtype))
    latents = torch.randn(9, 20, dtype=torch.float64) * 60
    query = torch.randn(new, H, 10, dtype=torch.float64) * 60
    given = (query.to(dtype), latents.to(dtype), rounded)
    for way in (_absorbed, _expanded):
        expected = way(
            given[0].double(),
            given[1].double(),
            Decoders(rounded.keys.double(), rounded.values.double()),
            None,
            0.002,
        )
        out = way(*given, None, 0.002)
        assert (out.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_heads_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = layer_of(16, 6, 4, True, None)
    query, latents = torch.randn(9, H, 10, dtype=torch.float64), torch.randn(9, 20, dtype=torch.float64)
    with torch.no_grad():
        whole = _expanded(query, latents, decoders_of(layer), None, 0.3)
        monkeypatch.setattr("headwise_vllm.paged.WORKSPACE", 1)
        torch.testing.assert_close(_expanded(query, latents, decoders_of(layer), None, 0.3), whole)
        parts = _absorbed(query, latents, decoders_of(layer), None, 0.3)
        monkeypatch.undo()
        torch.testing.assert_close(parts, _absorbed(query, latents, decoders_of(layer), None, 0.3))


def test_padding_is_not_stored() -> None:
    cache = torch.zeros(2, 1, 4, 3)
    store(cache, torch.ones(3, 3), torch.tensor([1, -1, -1]))
    assert cache.sum() == 3
    assert cache[0, 0, 1].sum() == 3
