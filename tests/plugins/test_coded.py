"""headwise's plugin for vLLM: codes in pages of bytes, beside headwise's own cache and layers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import headwise_vllm
from headwise.models.specs import GroupedSpec, LatentSpec, RopeSpec
from headwise.runtime.attention.base import merge_heads, rotated
from headwise.runtime.hf.attention import (
    CodedAttention,
    HostedGroupedAttention,
    HostedLatentAttention,
    SlotRotation,
)
from headwise.runtime.kernels.gpu import trellis as gpu_trellis
from headwise.runtime.quantization import SINKS, TransformCode, transform_code
from headwise.runtime.quantization.transform_code import TrellisFormat, blocks, code_shape
from headwise_vllm import coded as coded_pages
from headwise_vllm.coded import CodedHeads, CodedLatents, CodedPages, key_rotation, slot_tables
from headwise_vllm.config import CODE_FILE, CodedFolder
from headwise_vllm.paged import Decoders, Request
from headwise_vllm.pages import gather_codes, gather_wide, row_bytes, write_codes, write_wide

E, POISON = 40, 255
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
"""A rotary embedding that also scales queries and keys."""


class Paged:
    """Pages for some sequences, in an order that has nothing to do with theirs; whatever is not written is poison."""

    def __init__(self, lengths: list[int], tokens: int, row: int) -> None:
        counts = [-(-length // tokens) for length in lengths]
        order = torch.randperm(sum(counts) + 2)
        self.tokens, self.cache = tokens, torch.full((len(order), 1, tokens, row), POISON, dtype=torch.uint8)
        self.table, used = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32), 0
        for at, count in enumerate(counts):
            self.table[at, :count] = order[used : used + count]
            used += count

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        """Where tokens of a sequence go."""
        return self.table[sequence, positions // self.tokens].long() * self.tokens + positions % self.tokens


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    tokens=st.sampled_from([4, 5, 16, 32]),
    code_bytes=st.integers(1, 9),
    width=st.integers(1, 11),
    seed=st.integers(0, 2**31),
)
def test_pages_give_back_what_was_written(
    lengths: list[int], tokens: int, code_bytes: int, width: int, seed: int
) -> None:
    """Tokens of all sequences, some at a time and in any order of sequences; later ones leave first values alone."""
    torch.manual_seed(seed)
    pages = Paged(lengths, tokens, row_bytes(code_bytes, 2 * SINKS * width, tokens))
    codes = [torch.randint(0, 256, (length, code_bytes), dtype=torch.uint8) for length in lengths]
    wide = [torch.randn(length, width).to(torch.bfloat16) for length in lengths]
    written = [0] * len(lengths)
    while any(done < length for done, length in zip(written, lengths, strict=True)):
        at = int(torch.randint(len(lengths), (1,)))
        begin, end = written[at], min(lengths[at], written[at] + int(torch.randint(1, 9, (1,))))
        positions = torch.arange(begin, end)
        slots, first = pages.slots(at, positions), positions < SINKS
        write_codes(pages.cache, codes[at][begin:end], slots)
        write_wide(pages.cache, wide[at][begin:end][first], slots[first], positions[first], code_bytes)
        written[at] = end
    found = gather_codes(pages.cache, pages.table, max(lengths), code_bytes)
    values = gather_wide(pages.cache, pages.table, SINKS, code_bytes, width)
    for at, length in enumerate(lengths):
        assert torch.equal(found[at, 0, :length], codes[at])
        assert torch.equal(values[at, : min(length, SINKS)], wide[at][:SINKS])
    unused = [block for block in range(len(pages.cache)) if block not in pages.table]
    assert bool((pages.cache[unused] == POISON).all())


def hosted(spec: LatentSpec | GroupedSpec, pairs: int, dtype: torch.dtype = torch.float32) -> CodedAttention:
    """A layer of headwise's with random weights, and a code of one to eight bits."""
    torch.manual_seed(pairs)
    config = LlamaConfig(hidden_size=E, num_attention_heads=5, head_dim=16, rope_parameters=YARN)
    config._attn_implementation = "sdpa"
    made = HostedLatentAttention if isinstance(spec, LatentSpec) else HostedGroupedAttention
    layer = made(spec, config, 0, [i % 8 for i in range(pairs)]).to(dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    sections, parts = code_shape(spec)
    bits, width = tuple(1 + i * 3 % 8 for i in range(len(list(blocks(sections))))), sum(sections)
    code = TransformCode(torch.randn(width) / 10, torch.rand(width) / 5 + 0.1, bits, sections, parts)
    layer.set_code(code, SlotRotation(LlamaRotaryEmbedding(config)))
    return layer


def latents(N: int = 6, P: int = 12, bias: str = "", window: int | None = None) -> CodedAttention:
    return hosted(
        LatentSpec(
            hidden_size=E,
            num_heads=5,
            kv_lora_rank=20,
            qk_nope_head_dim=N,
            qk_rope_head_dim=P,
            v_head_dim=8,
            latent_norm=False,
            bias=frozenset(bias.split()),
            sliding_window=window,
        ),
        P // 2,
    )


def heads(
    K: int = 2, P: int = 24, bias: str = "", window: int | None = None, norm: str | None = None
) -> CodedAttention:
    return hosted(
        GroupedSpec(
            hidden_size=E,
            num_heads=6,
            num_kv_heads=K,
            head_dim=24,
            v_head_dim=8 if norm is None else None,
            bias=frozenset(bias.split()),
            qk_norm=norm,
            rope=RopeSpec(dim=P) if P else None,
            sliding_window=window,
        ),
        P // 2,
    )


LAYERS = {
    "latents": latents,
    "latents, biases": lambda: latents(bias="kv_b_proj kv_a_proj_with_mqa q_proj"),
    "latents, P = 0": lambda: latents(P=0, bias="kv_b_proj"),
    "latents, N = 0": lambda: latents(N=0),
    "latents, window": lambda: latents(window=9),
    "GQA": heads,
    "MHA, biases": lambda: heads(K=6, bias="q_proj k_proj v_proj"),
    "MQA, P = 0": lambda: heads(K=1, P=0),
    "GQA, norms of keys": lambda: heads(norm="head"),
    "GQA, window": lambda: heads(window=9),
}


def pages_of(layer: CodedAttention) -> CodedPages:
    """The plugin's pages of a layer."""
    spec, code, slots = layer.spec, layer.code, layer.slots
    assert code is not None
    assert slots is not None
    rotary: Any = slots._rotary
    keys = key_rotation(slot_tables(rotary.inv_freq, rotary.attention_scaling, 512), layer.channels)
    if isinstance(spec, LatentSpec):
        return CodedLatents(code, keys, spec.kv_lora_rank, spec.qk_rope_head_dim)
    assert isinstance(spec, GroupedSpec)
    return CodedHeads(code, keys, spec.num_kv_heads, spec.head_dim, spec.value_dim)


def step(layer: CodedAttention, pages: CodedPages, paged: Paged, inputs: list[tuple[int, int, Tensor]]) -> Tensor:
    """The outputs of new tokens of some sequences, stored and attended to together.

    Each input is a sequence, its tokens so far, and states ``[S, E]``.
    """
    queries, values, slots, positions, requests, begin = [], [], [], [], [], 0
    for sequence, former, states in inputs:
        S = len(states)
        rotation = layer._slot_rotation(states, former, former + S)
        if isinstance(layer, HostedLatentAttention):
            query = torch.cat(layer._queries(states[None], rotation), -1)
        else:
            assert isinstance(layer, HostedGroupedAttention)
            heads = layer._heads(layer.q_proj(states[None]), layer.spec.num_heads, layer.q_norm)
            query = rotated(heads, rotation, layer.rope)
        queries.append(query[0].transpose(0, 1))
        values.append(layer._states_to_cache(states[None], None)[0][0, 0])
        positions.append(torch.arange(former, former + S))
        slots.append(paged.slots(sequence, positions[-1]))
        requests.append(Request(begin, begin + S, former + S))
        begin += S
    pages.store(paged.cache, torch.cat(values), torch.cat(slots), torch.cat(positions))
    table = paged.table[[sequence for sequence, _, _ in inputs]]
    options: dict[str, Any] = {"scale": scale_of(layer), "window": layer.window}
    if isinstance(pages, CodedLatents):
        mixed = pages.attend(torch.cat(queries), paged.cache, table, requests, decoders_of(layer), **options)
    else:
        assert isinstance(pages, CodedHeads)
        mixed = pages.attend(torch.cat(queries), paged.cache, table, requests, **options)
    out: Tensor = layer.o_proj(merge_heads(mixed.transpose(0, 1)[None])[0])  # type: ignore[operator]
    return out


def scale_of(layer: CodedAttention) -> float:
    return layer._scale() if isinstance(layer, HostedLatentAttention) else float(layer.spec.head_dim) ** -0.5


def decoders_of(layer: CodedAttention) -> Decoders:
    assert isinstance(layer, HostedLatentAttention)
    keys, values = layer._decoders()
    if layer.kv_b_proj.bias is None:
        return Decoders(keys, values)
    biases = layer.kv_b_proj.bias.unflatten(0, (len(keys), -1))
    return Decoders(keys, values, *biases.split_with_sizes((keys.shape[1], values.shape[1]), dim=1))


def served(layer: CodedAttention, sequences: list[Tensor], chunk: int, *, together: bool) -> list[Tensor]:
    """The plugin's outputs of sequences: a chunk of each at a time, and at the end single tokens."""
    pages, lengths = pages_of(layer), [len(states) for states in sequences]
    paged = Paged(lengths, 16, pages.row_bytes(16))
    done, outputs = [0] * len(lengths), [list[Tensor]() for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        inputs = []
        for i, length in enumerate(lengths):
            new = min(chunk, max(1, length - 5 - done[i]), length - done[i])
            if new:
                inputs.append((i, done[i], sequences[i][done[i] : done[i] + new]))
        for batch in [inputs] if together else [[one] for one in inputs]:
            parts = step(layer, pages, paged, batch).split([len(states) for _, _, states in batch])
            for (i, _, states), part in zip(batch, parts, strict=True):
                outputs[i].append(part)
                done[i] += len(states)
    return [torch.cat(parts) for parts in outputs]


def by_headwise(layer: CodedAttention, states: Tensor, chunk: int) -> Tensor:
    """headwise's own outputs of a sequence, in the same chunks."""
    past, done, parts = DynamicCache(), 0, []
    past.layers = [layer.cache_layer(512)]  # type: ignore[list-item]
    while done < len(states):
        new = min(chunk, max(1, len(states) - 5 - done))
        parts.append(layer(states[None, done : done + new], None, None, past)[0][0])
        done += new
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_attention_is_that_of_headwise(name: str, chunk: int) -> None:
    layer = LAYERS[name]()
    states = torch.randn(83, E)
    expected = by_headwise(layer, states, chunk)
    (found,) = served(layer, [states], chunk, together=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["latents, biases", "latents, window", "GQA", "GQA, window"])
@torch.inference_mode()
def test_requests_together_are_as_one_each(name: str) -> None:
    layer = LAYERS[name]()
    sequences = [torch.randn(length, E) for length in (1, 3, 4, 7, 20, 33, 64, 90)]
    alone = served(layer, sequences, 40, together=False)
    for one, other in zip(alone, served(layer, sequences, 40, together=True), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["latents, biases", "GQA, window"])
@torch.inference_mode()
def test_without_kernels_torch_does_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, states = LAYERS[name](), torch.randn(40, E)
    expected = by_headwise(layer, states, 9)
    monkeypatch.setattr(TrellisFormat, "can_attend_to", lambda *_, **__: False)
    monkeypatch.setattr(TrellisFormat, "attend", None)
    monkeypatch.setattr(coded_pages, "DECODED", 7)
    (found,) = served(layer, [states], 9, together=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is then compiled, for tensors on the GPU")
@pytest.mark.parametrize("name", ["latents, biases", "latents, window", "GQA, window", "MQA, P = 0"])
@torch.inference_mode()
def test_the_kernel_for_gpus_reads_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, sequences = LAYERS[name](), [torch.randn(length, E) for length in (40, 12)]
    expected = served(layer, sequences, 20, together=True)
    for module in (transform_code, coded_pages):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(transform_code, "attend_trellis", None)
    monkeypatch.setattr(gpu_trellis, "_PARTS_OF_PAGES", 2)
    for one, other in zip(expected, served(layer, sequences, 20, together=True), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=2e-5 * float(one.abs().max()))


@pytest.mark.parametrize("name", ["latents", "GQA"])
@torch.inference_mode()
def test_bytes_are_those_of_headwise(name: str) -> None:
    """Codes and first tokens in pages, as headwise's own cache holds them; padding is not stored."""
    layer, states = LAYERS[name](), torch.randn(30, E)
    values = layer._states_to_cache(states[None], None)[0]
    own = layer.cache_layer(None)
    assert own is not None
    own.append(values, values[..., :0], torch.zeros(1, dtype=torch.int64))
    pages = pages_of(layer)
    paged, positions = Paged([30], 16, pages.row_bytes(16)), torch.arange(30)
    padded = torch.cat((paged.slots(0, positions), torch.tensor([-1, -1])))
    pages.store(paged.cache, torch.cat((values[0, 0], values[0, 0, :2])), padded, torch.arange(32))
    codes, _, wide, _ = own.stored
    size = pages.code.token_bytes
    assert torch.equal(gather_codes(paged.cache, paged.table, 30, size), codes)
    assert torch.equal(gather_wide(paged.cache, paged.table, SINKS, size, pages.code.width), wide)
    blocks_written = {int(block) for block in paged.table[0] if block >= 0}
    assert bool((paged.cache[[b for b in range(len(paged.cache)) if b not in blocks_written]] == POISON).all())


def test_a_code_of_another_layer_is_refused() -> None:
    code = latents().code
    assert code is not None
    with pytest.raises(ValueError, match=r"sections = \(20, 6, 6\): must be \(21, 6, 6\)"):
        CodedLatents(code, None, 21, 12)


def test_stock_folders_with_codes_have_a_class_of_their_own(tmp_path: Path) -> None:
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(model=str(tmp_path), hf_config=config)
    CodedFolder.verify_and_update_model_config(model)
    assert config.architectures == ["LlamaForCausalLM"]
    (tmp_path / CODE_FILE).touch()
    CodedFolder.verify_and_update_model_config(model)
    assert config.architectures == ["HeadwiseCodedLlamaForCausalLM"]


def test_codes_are_read_without_transformers() -> None:
    """headwise is installed beside vLLM without what it depends on, of which vLLM has other versions or none."""
    plugin = str(Path(headwise_vllm.__file__).parents[1])
    absent = ("transformers", "gguf", "typer", "rich", "huggingface_hub", "tokenizers", "jinja2", "matplotlib")
    hide = f"import sys; sys.path.insert(0, {plugin!r}); sys.modules |= dict.fromkeys({absent})"
    script = f"{hide}; import headwise_vllm.coded"
    subprocess.run([sys.executable, "-c", script], check=True)
