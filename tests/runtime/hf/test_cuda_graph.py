"""Greedy decoding through a static cache gives the tokens of `generate`, and never too many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise
from headwise.runtime.hf.generate import Recorded, can_record, decode_recorded
from tests.real_models import save_tiny


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=128,
        initializer_range=0.5,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    made: LlamaForCausalLM = headwise.optimize(LlamaForCausalLM(config).eval())
    return made


@pytest.mark.parametrize("implementation", ["headwise", "sdpa", "eager"])
def test_it_says_what_generate_says(model: LlamaForCausalLM, implementation: str) -> None:
    ids = torch.randint(0, 50, (1, 7), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        assert torch.equal(decode_recorded(model, ids, 20), expected)
    finally:
        model.set_attn_implementation(before)
    stop = int(expected[0, 12])
    first = 7 + expected[0, 7:].tolist().index(stop)
    assert torch.equal(decode_recorded(model, ids, 20, [stop]), expected[:, : first + 1])
    assert decode_recorded(model, ids, 1).shape == (1, 8)


def test_a_step_is_called_where_there_is_nothing_to_record_it() -> None:
    calls = []
    step = Recorded(lambda: calls.append(1), torch.device("cpu"))
    for _ in range(6):
        step()
    assert len(calls) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_plays_back_what_it_recorded(model: LlamaForCausalLM) -> None:
    ids = torch.randint(0, 50, (1, 7), generator=torch.Generator().manual_seed(1)).cuda()
    on_gpu = model.cuda()
    try:
        expected = on_gpu.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert torch.equal(decode_recorded(on_gpu, ids, 20), expected)
    finally:
        model.cpu()


def test_converted_models_are_not_recorded(tmp_path: Path, model: LlamaForCausalLM) -> None:
    save_tiny(tmp_path / "model", "llama")
    headwise.convert(tmp_path / "model", tmp_path / "made", to="mla", kv_budget=0.5, evaluate=False)
    assert can_record(model)
    assert not can_record(headwise.load(tmp_path / "made"))
