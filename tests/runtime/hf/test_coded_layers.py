"""Layers with codes: attention to them as they are stored equals attention to their decoded values."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headwise.models.specs import GroupedSpec, LatentSpec, RopeSpec
from headwise.runtime.hf.attention import (
    CodedAttention,
    HostedGroupedAttention,
    HostedLatentAttention,
    SlotRotation,
)
from headwise.runtime.kernels.native import built
from headwise.runtime.quantization import TransformCode, transform_code, trellis_format
from headwise.runtime.quantization.transform_code import blocks
from headwise.runtime.quantization.trellis_format import KeyRotation, TrellisFormat
from tests.threads import interleaved

pytestmark = pytest.mark.skipif(built().library is None, reason=f"no compiled kernel: {built().reason}")

E, H, R, V = 40, 5, 20, 8
SCALING = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
"""A rotary embedding that also scales queries and keys."""
LENGTHS = (70, 1, 1, 3, 8, 1)
"""New tokens of each call; the first calls are a prompt and single tokens."""


def coded_layer(N: int, P: int, bias: frozenset[str], dtype: torch.dtype) -> HostedLatentAttention:
    """A layer with random weights and a code of one to eight bits."""
    torch.manual_seed(N + P)
    config = LlamaConfig(hidden_size=E, num_attention_heads=H, head_dim=16, rope_parameters=SCALING)
    config._attn_implementation = "sdpa"
    spec = LatentSpec(
        hidden_size=E,
        num_heads=H,
        kv_lora_rank=R,
        qk_nope_head_dim=N,
        qk_rope_head_dim=P,
        v_head_dim=V,
        latent_norm=False,
        bias=bias,
    )
    layer = HostedLatentAttention(spec, config, 0, [i % 8 for i in range(P // 2)]).to(dtype).eval()
    sections, parts = ((R, P // 2, P // 2), (R, P)) if P else ((R,), (R,))
    bits = tuple(1 + i * 3 % 8 for i in range(len(list(blocks(sections)))))
    code = TransformCode(torch.randn(R + P) / 10, torch.rand(R + P) / 5 + 0.1, bits, sections, parts)
    layer.set_code(code, SlotRotation(LlamaRotaryEmbedding(config)))
    return layer


def grouped_layer(K: int, P: int, dtype: torch.dtype) -> HostedGroupedAttention:
    """A layer of GQA with random weights and a code of one to eight bits."""
    torch.manual_seed(K + P)
    heads, D = 6, 24
    config = LlamaConfig(hidden_size=E, num_attention_heads=H, head_dim=16, rope_parameters=SCALING)
    config._attn_implementation = "sdpa"
    rope = RopeSpec(dim=P) if P else None
    spec = GroupedSpec(hidden_size=E, num_heads=heads, num_kv_heads=K, head_dim=D, v_head_dim=V, rope=rope)
    layer = HostedGroupedAttention(spec, config, 0, [i % 8 for i in range(P // 2)]).to(dtype).eval()
    sections, width = (D,) * K + (V,) * K, K * (D + V)
    bits = tuple(1 + i * 3 % 8 for i in range(len(list(blocks(sections)))))
    code = TransformCode(torch.randn(width) / 10, torch.rand(width) / 5 + 0.1, bits, sections, (K * D, K * V))
    layer.set_code(code, SlotRotation(LlamaRotaryEmbedding(config)))
    return layer


def outputs(layer: CodedAttention, states: Tensor, mask: Tensor | None) -> Tensor:
    """The layer's outputs for one call after another, with spare memory that holds other bytes."""
    past, done, parts = DynamicCache(), 0, []
    past.layers = [layer.cache_layer(200)]
    for length in LENGTHS:
        seen = None if mask is None else mask[:, : done + length]
        out, _ = layer(states[:, done : done + length], None, seen, past)
        parts.append(out)
        done += length
        past.layers[0].memory["keys"][:, :, done:] = 0xFF
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("N", "P", "bias"), [(0, 12, ""), (6, 12, "kv_b_proj"), (6, 0, ""), (0, 32, "kv_b_proj")])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("has_padding", [False, True])
def test_codes_are_read_as_they_are_stored(
    N: int, P: int, bias: str, dtype: torch.dtype, close: float, has_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = coded_layer(N, P, frozenset({bias} - {""}), dtype)
    check_reading(layer, dtype, close, has_padding, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is then compiled, for tensors on the GPU")
@pytest.mark.parametrize(("N", "P", "bias"), [(0, 12, ""), (6, 12, "kv_b_proj"), (6, 0, "")])
@pytest.mark.parametrize("has_padding", [False, True])
def test_latents_are_read_by_the_kernel_for_gpus(
    N: int, P: int, bias: str, has_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transform_code, trellis_format):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(trellis_format, "attend_trellis", None)
    layer = coded_layer(N, P, frozenset({bias} - {""}), torch.float32)
    check_reading(layer, torch.float32, 1e-5, has_padding, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is then compiled, for tensors on the GPU")
@pytest.mark.parametrize(("K", "P", "has_padding"), [(2, 24, True), (6, 16, False), (1, 0, True)])
def test_heads_are_read_by_the_kernel_for_gpus(
    K: int, P: int, has_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transform_code, trellis_format):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(trellis_format, "attend_trellis", None)
    check_reading(grouped_layer(K, P, torch.float32), torch.float32, 1e-5, has_padding, monkeypatch)


@pytest.mark.parametrize(("K", "P"), [(2, 24), (6, 16), (1, 0)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("has_padding", [False, True])
def test_codes_of_heads_are_read_as_they_are_stored(
    K: int, P: int, dtype: torch.dtype, close: float, has_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_reading(grouped_layer(K, P, dtype), dtype, close, has_padding, monkeypatch)


def check_reading(
    layer: CodedAttention, dtype: torch.dtype, close: float, has_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of attention to decoded values, which only the prompt's is."""
    states = torch.randn(2, sum(LENGTHS), E, dtype=dtype)
    mask = None
    if has_padding:
        mask = torch.ones(2, sum(LENGTHS), dtype=torch.long)
        mask[0, :9] = 0
    decoded: list[int] = []
    decode = TransformCode.decode

    def counted(code: TransformCode, codes: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        decoded.append(codes.shape[2])
        return decode(code, codes, kind)

    monkeypatch.setattr(TransformCode, "decode", counted)
    with torch.inference_mode():
        out = outputs(layer, states, mask)
        assert decoded == [LENGTHS[0]]  # the prompt alone
        monkeypatch.setattr(CodedAttention, "_can_attend_to_codes", lambda *_: False)
        expected = outputs(layer, states, mask)
    assert len(decoded) == 1 + len(LENGTHS)
    seen = torch.ones(2, sum(LENGTHS), dtype=torch.bool) if mask is None else mask.bool()
    assert (out - expected)[seen].abs().max() <= close * max(1.0, expected[seen].abs().max().item())


def test_gradients_and_weights_go_by_torch() -> None:
    layer = coded_layer(6, 12, frozenset(), torch.float32)
    states = torch.randn(1, sum(LENGTHS), E, requires_grad=True)
    assert outputs(layer, states.detach(), None).requires_grad  # of the weights
    layer.config._attn_implementation = "eager"
    past = DynamicCache()
    past.layers = [layer.cache_layer(None)]
    with torch.inference_mode():
        _, weights = layer(states[:, :1], None, None, past)
    assert weights is not None


@pytest.mark.parametrize("is_latent", [False, True])
def test_a_code_moves_with_its_layer(is_latent: bool) -> None:
    layer: CodedAttention = (
        coded_layer(6, 12, frozenset(), torch.float32) if is_latent else grouped_layer(2, 24, torch.float32)
    )
    code = layer.code
    layer.to(torch.bfloat16)
    assert layer.code is code  # its numbers stay as wide as they are
    layer.to("meta")
    assert layer.code is not None
    assert layer.code.offset.device.type == layer.code.scale.device.type == "meta"
    assert layer.code.offset.dtype == torch.float32
    codes = layer.cache_layer(None)
    assert codes is not None
    assert codes.codec is layer.codec


def rotation(layer: CodedAttention, first: float) -> KeyRotation:
    """How keys are rotated where a rotary embedding has this frequency first."""
    rotary = LlamaRotaryEmbedding(layer.config)
    rotary.inv_freq[0] = first
    return SlotRotation(rotary).of_keys(10, layer.channels_of(rotary.inv_freq), tuple(layer.channels))


def test_threads_are_given_the_rotation_of_their_own_slots() -> None:
    layer = grouped_layer(2, 8, torch.float32)
    slots, channels = layer.slots, layer.channels_of(torch.zeros(1))
    assert slots is not None

    def of(*numbers: int) -> Tensor:
        each = (slots.of_slot(slot, channels, tuple(layer.channels), torch.float32) for slot in numbers)
        return torch.stack([torch.stack(rotation) for rotation in each])

    expected, results = of(3, 4), list(interleaved(lambda: of(3, 4), lambda: of(5), SlotRotation.of_slot))
    assert len(results) > 4
    assert all(torch.equal(result, expected) for result in results)


def test_threads_whose_keys_are_rotated_otherwise_read_by_their_own_layout() -> None:
    layer = grouped_layer(2, 8, torch.float32)
    one, two, three = (rotation(layer, first) for first in (1.0, 0.5, 0.25))
    codec = layer.codec
    assert codec is not None

    def turns(*rotations: KeyRotation) -> Tensor:
        return torch.stack([codec.layout_for(each, of_gpu=False).turn for each in rotations])

    expected = turns(one, two)
    results = list(interleaved(lambda: turns(one, two), lambda: turns(three), TrellisFormat.layout_for))
    assert len(results) > 4
    assert all(torch.equal(result, expected) for result in (*results, turns(one, two)))


def test_frequencies_may_change_while_another_thread_asks_for_them() -> None:
    layer = grouped_layer(2, 8, torch.float32)
    slots, channels = layer.slots, layer.channels_of(torch.zeros(1))
    assert slots is not None
    turns = interleaved(
        lambda: slots.of_keys(10, channels, "").turn, slots._forget, SlotRotation.of_keys, SlotRotation.tables
    )
    first = next(turns)
    assert all(torch.equal(torch.stack(turn), torch.stack(first)) for turn in turns)


def test_a_fork_of_a_cache_reads_the_same_code() -> None:
    layer = grouped_layer(2, 8, torch.float32)
    past = layer.cache_layer(None)
    fork = copy.deepcopy(past)
    assert fork is not None
    assert fork.codec is not past.codec
    assert fork.codec.code is layer.code
