"""headwise's plugin for vLLM: codes in pages of bytes, beside headwise's own cache and layers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
from headwise.runtime.kernels.gpu import codes as gpu_codes
from headwise.runtime.kernels.gpu import trellis as gpu_trellis
from headwise.runtime.quantization import TransformCode, transform_code, trellis_format
from headwise.runtime.quantization.transform_code import blocks, code_shape, heads_shape
from headwise.runtime.quantization.trellis_format import TrellisFormat
from headwise_vllm.coded import CodedHeads, CodedLatents, CodedPages, key_rotation, slot_tables
from headwise_vllm.config import CODE_FILE, Folders
from headwise_vllm.paged import Batch, Decoders

E, POISON = 40, 255
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
"""A rotary embedding that also scales queries and keys."""


class Paged:
    """Pages for some sequences, in an order that has nothing to do with theirs; whatever is not written is poison."""

    def __init__(self, lengths: list[int], tokens: int, row: int) -> None:
        counts = [-(-length // tokens) for length in lengths]
        order = 1 + torch.randperm(sum(counts) + 2)  # the first page is given to no sequence
        self.tokens, self.cache = tokens, torch.full((len(order) + 1, 1, tokens, row), POISON, dtype=torch.uint8)
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
    seed=st.integers(0, 2**31),
)
def test_pages_hold_the_codes_of_each_sequence(lengths: list[int], tokens: int, seed: int) -> None:
    """Some new tokens of some sequences at a time, in any order; whatever was not written is left alone."""
    torch.manual_seed(seed)
    sections, parts = heads_shape(1, 9, 11)
    offset, scale, first_offset, first_scale = torch.rand(4, 20) + 0.1
    first = TransformCode(9 * first_offset, first_scale, (2, 2), sections, parts)
    code = TransformCode(offset, scale, (3, 2), sections, parts, first)
    pages = CodedHeads(code, None, 1, 9, 11)
    paged, values = Paged(lengths, tokens, pages.row_bytes), [torch.randn(length, 20) for length in lengths]
    written = [0] * len(lengths)
    while any(done < length for done, length in zip(written, lengths, strict=True)):
        some = [at for at in torch.randperm(len(lengths)).tolist() if torch.rand(()) < 0.7]
        new = [min(lengths[at] - written[at], int(torch.randint(0, 9, ()))) for at in some]
        parts_of = [range(written[at], written[at] + count) for at, count in zip(some, new, strict=True)]
        slots = [
            paged.slots(at, torch.arange(part.start, part.stop)) for at, part in zip(some, parts_of, strict=True)
        ]
        counts = torch.tensor([part.stop for part in parts_of], dtype=torch.int32)
        batch = Batch(
            torch.tensor([0, *new]).cumsum(0), counts, paged.table[some], torch.cat([torch.arange(0), *slots])
        )
        states = [values[at][part.start : part.stop] for at, part in zip(some, parts_of, strict=True)]
        pages.store(paged.cache, torch.cat([*states, torch.empty(0, 20)]), batch)
        for at, part in zip(some, parts_of, strict=True):
            written[at] = part.stop
    for at, (length, states) in enumerate(zip(lengths, values, strict=True)):
        slots, is_first = paged.slots(at, torch.arange(length)), torch.arange(length) == 0
        codes = code.encode(states, is_first)
        assert torch.equal(paged.cache[slots // tokens, 0, slots % tokens], codes)
        found = pages.decoded(paged.cache, paged.table[at], length, torch.float32)
        assert torch.equal(found, code.decode(codes, is_first=is_first))
    unused = [page for page in range(1, len(paged.cache)) if page not in paged.table]
    assert bool((paged.cache[unused] == POISON).all())


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
    first = TransformCode(torch.randn(width) * 3, torch.rand(width) / 5 + 0.1, bits[::-1], sections, parts)
    if first.token_bytes > (own := TransformCode(first.offset, first.scale, bits, sections, parts)).token_bytes:
        first = own
    code = TransformCode(torch.randn(width) / 10, torch.rand(width) / 5 + 0.1, bits, sections, parts, first)
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
        pages = CodedLatents(code, keys, spec.kv_lora_rank, spec.qk_rope_head_dim)
        pages.decoders = lambda: decoders_of(layer)
        return pages
    assert isinstance(spec, GroupedSpec)
    return CodedHeads(code, keys, spec.num_kv_heads, spec.head_dim, spec.value_dim)


def step(layer: CodedAttention, pages: CodedPages, paged: Paged, inputs: list[tuple[int, int, Tensor]]) -> Tensor:
    """The outputs of new tokens of some sequences, stored and attended to together.

    Each input is a sequence, its tokens so far, and states ``[S, E]``.
    """
    queries, values, slots, starts, lengths = [], [], [], [0], []
    for sequence, former, states in inputs:
        S = len(states)
        rotation = layer.slot_rotation(states, former, former + S)
        if isinstance(layer, HostedLatentAttention):
            query = torch.cat(layer._queries(states[None], rotation), -1)
        else:
            assert isinstance(layer, HostedGroupedAttention)
            heads = layer._heads(layer.q_proj(states[None]), layer.spec.num_heads, layer.q_norm)
            query = rotated(heads, rotation, layer.rope)
        queries.append(query[0].transpose(0, 1))
        values.append(layer._states_to_cache(states[None], None)[0][0, 0])
        slots.append(paged.slots(sequence, torch.arange(former, former + S)))
        starts.append(starts[-1] + S)
        lengths.append(former + S)
    table = paged.table[[sequence for sequence, _, _ in inputs]]
    batch = Batch(torch.tensor(starts), torch.tensor(lengths, dtype=torch.int32), table, torch.cat(slots))
    pages.store(paged.cache, torch.cat(values), batch)
    mixed = pages.attend(torch.cat(queries), paged.cache, batch, scale=scale_of(layer), window=layer.window)
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
    paged = Paged(lengths, 16, pages.row_bytes)
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
    (found,) = served(layer, [states], 9, together=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is then compiled, for tensors on the GPU")
@pytest.mark.parametrize("name", ["latents, biases", "latents, window", "GQA, window", "MQA, P = 0"])
@torch.inference_mode()
def test_the_kernel_for_gpus_reads_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, sequences = LAYERS[name](), [torch.randn(length, E) for length in (40, 12)]
    expected = served(layer, sequences, 20, together=True)
    for module in (transform_code, trellis_format):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(trellis_format, "attend_trellis", None)
    monkeypatch.setattr(gpu_trellis, "_PARTS_OF_PAGES", 2)
    for one, other in zip(expected, served(layer, sequences, 20, together=True), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=2e-5 * float(one.abs().max()))


class NothingWaits(TorchDispatchMode):
    """Refuses operations for which a GPU's results are waited for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITING, f"waits for {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is then compiled, for tensors on the GPU")
@pytest.mark.parametrize("name", ["latents", "GQA, window"])
@torch.inference_mode()
def test_a_step_on_a_gpu_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]()
    for module in (transform_code, trellis_format):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(gpu_trellis, "_PARTS_OF_PAGES", 2)
    monkeypatch.setattr(gpu_codes, "is_watched", lambda *_: False)  # the mode below watches operations too
    pages, paged, lengths = pages_of(layer), Paged([20, 7], 16, pages_of(layer).row_bytes), [20, 1]
    slots = torch.cat([paged.slots(at, torch.tensor([length - 1])) for at, length in enumerate(lengths)])
    query = layer._states_to_cache(torch.randn(1, 2, E), None)[0][0, 0]
    width = pages.rank + 12 if isinstance(pages, CodedLatents) else pages.head_dim
    heads = torch.randn(2, layer.spec.num_heads, width)
    for counted in (False, True):  # what is computed once is computed before a graph is captured
        batch = Batch(torch.arange(3), torch.tensor(lengths, dtype=torch.int32), paged.table, slots)
        with NothingWaits() if counted else nullcontext():
            pages.store(paged.cache, query, batch)
            pages.attend(heads, paged.cache, batch, scale=1.0, window=layer.window)
        assert "requests" not in vars(batch)


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
    paged = Paged([30], 16, pages.row_bytes)
    padded = torch.cat((paged.slots(0, torch.arange(30)), torch.tensor([-1, -1])))
    batch = Batch(torch.tensor([0, 30, 31, 32]), torch.tensor([30, 0, 0]), paged.table, padded)
    pages.store(paged.cache, torch.cat((values[0, 0], values[0, 0, :2])), batch)
    written = paged.table[0, :2].long()
    assert torch.equal(paged.cache[written, 0].flatten(0, 1)[:30], own.stored[0][0, 0])
    others = [page for page in range(1, len(paged.cache)) if page not in written]
    assert bool((paged.cache[others] == POISON).all())
    assert bool((paged.cache[written, 0].flatten(0, 1)[30:] == POISON).all())


def test_a_code_that_pages_cannot_hold_is_refused() -> None:
    code = latents().code
    assert code is not None
    with pytest.raises(ValueError, match="is of format 1, which pages cannot hold; convert the model again"):
        CodedLatents(replace(code, first=None), None, 20, 12)
    with pytest.raises(ValueError, match=r"sections = \(20, 6, 6\): must be \(21, 6, 6\)"):
        CodedLatents(code, None, 21, 12)


def test_stock_folders_with_codes_have_a_class_of_their_own(tmp_path: Path) -> None:
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(model=str(tmp_path), hf_config=config)
    Folders.verify_and_update_model_config(model)
    assert config.architectures == ["LlamaForCausalLM"]
    (tmp_path / CODE_FILE).touch()
    Folders.verify_and_update_model_config(model)
    assert config.architectures == ["HeadwiseCodedLlamaForCausalLM"]


@pytest.mark.parametrize("architecture", ["HeadwiseLlamaForCausalLM", "HeadwiseCodedLlamaForCausalLM"])
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"cache_dtype": "float16"}, None),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype = 'fp8': must be auto"),
        ({"rope_type": "dynamic"}, "rope_type = 'dynamic': must be one of default, linear"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size = 2: must be 1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3: must be 1: codes of heads"),
    ],
)
def test_what_is_not_served_is_refused_before_it_is_loaded(
    architecture: str, change: dict[str, Any], line: str | None
) -> None:
    given = SimpleNamespace(
        **({"cache_dtype": "auto", "decode_context_parallel_size": 1, "tensor_parallel_size": 1} | change)
    )
    rope = {"rope_type": change.get("rope_type", "yarn")}
    config = SimpleNamespace(architectures=[architecture], rope_parameters=rope)
    model = SimpleNamespace(hf_config=config, dtype=torch.float16)
    asked = SimpleNamespace(model_config=model, cache_config=given, parallel_config=given)
    if line is None or ("tensor" in line and "Coded" not in architecture):
        Folders.verify_and_update_config(asked)
        return
    with pytest.raises(ValueError, match=line):
        Folders.verify_and_update_config(asked)
    config.architectures = ["LlamaForCausalLM"]
    Folders.verify_and_update_config(asked)  # another's folder


def test_codes_are_read_without_transformers() -> None:
    """headwise is installed beside vLLM without what it depends on, of which vLLM has other versions or none."""
    plugin = str(Path(headwise_vllm.__file__).parents[1])
    absent = ("transformers", "gguf", "typer", "rich", "huggingface_hub", "tokenizers", "jinja2", "matplotlib")
    hide = f"import sys; sys.path.insert(0, {plugin!r}); sys.modules |= dict.fromkeys({absent})"
    script = f"{hide}; import headwise_vllm.coded"
    subprocess.run([sys.executable, "-c", script], check=True)
