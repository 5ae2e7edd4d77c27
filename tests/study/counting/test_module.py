"""`count` against sums by hand, and against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

from headwise import cost
from headwise.measure.timing import cache_nbytes
from headwise.models.specs import read_config
from headwise.runtime.attention import GroupedQueryAttention
from headwise.study.counting.module import count


class Sdpa(nn.Module):
    """Nothing but torch's fused attention."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


def heads(tokens: int) -> Tensor:
    return torch.randn(2, 3, tokens, 8, requires_grad=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("S", "T"), [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1), (1, 1)])
def test_fused_attention_is_charged_pair_by_pair(S: int, T: int, is_causal: bool) -> None:
    forward = backward = causal_forward = 0
    for row in range(S):
        for column in range(T):
            forward += 2 * 2 * 3 * (8 + 8)
            backward += 2 * 2 * 3 * (3 * 8 + 2 * 8)
            if not is_causal or column <= row:  # torch's flag is top-left
                causal_forward += 2 * 2 * 3 * (8 + 8)
    counted = count(Sdpa(is_causal=is_causal), heads(S), heads(T), heads(T), backward=True)
    assert (counted.forward_flops, counted.causal_flops, counted.backward_flops) == (
        forward,
        causal_forward,
        backward,
    )
    assert set(counted.by_operator) == {"aten._scaled_dot_product_flash_attention_for_cpu"}


def test_torch_alone_counts_nothing_there() -> None:
    """The gap that `count` closes; where torch closes it itself, our formula can go."""
    with FlopCounterMode(display=False) as counter:
        Sdpa(is_causal=False)(heads(4), heads(4), heads(4))
    assert counter.get_total_flops() == 0


def test_two_calls_in_one_module_add_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.causal = Sdpa(is_causal=False), Sdpa(is_causal=True)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = self.whole(query, key, value)
            out: Tensor = self.causal(mixed, key, value) @ mixed.transpose(2, 3)
            return out

    counted = count(Twice(), heads(4), heads(4), heads(4))
    pair = 2 * 2 * 3 * 16
    assert counted.forward_flops == pair * (16 + 16) + 2 * 2 * 3 * 4 * 8 * 4
    assert counted.causal_flops == pair * (16 + 10) + 2 * 2 * 3 * 4 * 8 * 4
    assert sum(counted.by_operator.values()) == counted.forward_flops


class Tied(nn.Module):
    """``relu(x Wᵀ) W``, its weight under two names; what it is asked for comes in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, bias=False)
        self.same = self.up

    def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"out": [F.relu(self.up(x)) @ self.same.weight], "nothing": None, "constant": torch.ones(3)}


def test_a_small_module_by_hand() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    counted = count(Tied(), x, backward=True)
    assert counted.parameters == 35
    assert counted.forward_flops == counted.causal_flops == 2 * 2 * 3 * 35
    assert counted.backward_flops == 2 * counted.forward_flops
    # x for the weight's gradient, and what relu gave for its own and for the weight's: one tensor.
    assert counted.saved_bytes == 4 * (3 * 5 + 3 * 7)
    without = count(Tied(), x.detach(), backward=True)
    assert without.backward_flops == 2 * counted.forward_flops - 2 * 3 * 35


def test_without_backward_nothing_is_kept() -> None:
    counted = count(Tied(), torch.randn(3, 5))
    assert (counted.backward_flops, counted.saved_bytes, counted.cache_bytes) == (None, None, 0)


def test_a_view_keeps_all_of_its_storage_once() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, right = x.sin().split(2, dim=-1)
            return (left * right).sum()

    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert count(Halves(), x, backward=True).saved_bytes == 8 * (24 + 24)


@pytest.mark.parametrize("by_name", [False, True])
def test_caches_among_the_arguments(by_name: bool) -> None:
    layer = GroupedQueryAttention(16, 4, 2, v_head_dim=3)
    cache = layer.new_cache(2, 5)
    assert cache_nbytes(cache) == 2 * 2 * 5 * (4 + 3) * 4
    if by_name:
        assert count(layer, torch.zeros(2, 1, 16), cache=cache).cache_bytes == cache_nbytes(cache)
    theirs = DynamicCache()
    theirs.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 5), 0)
    theirs.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 5), 1)
    assert cache_nbytes(theirs) == 2 * 4 * (2 * 2 * 3 * (4 + 5))
    assert count(Tied(), torch.zeros(1, 5), past=theirs).cache_bytes == cache_nbytes(theirs)
    assert [cache_nbytes(value) for value in (None, 3, torch.zeros(3), DynamicCache())] == [0] * 4


@pytest.mark.parametrize("backend", ["reference", "packed"])
def test_unfused_layers_count_as_torch_counts_them(backend: Any) -> None:
    layer = GroupedQueryAttention(16, 4, 2, v_head_dim=3, backend=backend)
    x = torch.randn(2, 6, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    counted = count(layer, x, backward=True)
    assert counted.backward_flops is not None
    assert counted.forward_flops + counted.backward_flops == counter.get_total_flops()


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.function(*args)
        return out


def test_products_with_a_vector_count() -> None:
    matrix, vector = torch.randn(4, 5), torch.randn(5)
    assert count(Apply(torch.mv), matrix, vector).forward_flops == 2 * 4 * 5
    assert count(Apply(torch.dot), vector, vector).forward_flops == 2 * 5


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torchs_fused_modules_count_as_what_they_are_made_of(mode: str) -> None:
    x = torch.randn(2, 5, 16)
    attention = getattr(nn.MultiheadAttention(16, 4, batch_first=True), mode)()
    assert count(attention, x, x, x).forward_flops == 2 * 2 * (4 * 5 * 16 * 16 + 2 * 5 * 5 * 16)
    encoder = getattr(nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True), mode)()
    assert count(encoder, x).forward_flops == count(attention, x, x, x).forward_flops + 2 * 2 * 5 * 2 * 16 * 24
    assert torch.backends.mha.get_fastpath_enabled()
    recurrent = getattr(nn.LSTM(16, 8, batch_first=True), mode)()
    assert count(recurrent, x).forward_flops == 2 * 2 * 5 * 4 * 8 * (16 + 8)


def test_grouped_experts_count_as_the_experts_one_by_one() -> None:
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    model, ids = MixtralForCausalLM(config).eval(), torch.arange(12)[None]
    counted = count(model, ids, use_cache=False)
    spec = read_config({key: value for key, value in config.to_dict().items() if value is not None})
    assert counted.forward_flops == cost.model.forward_flops(spec, 12, causal=False).total


def test_counting_touches_nobodys_gradients() -> None:
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    layer(x).sum().backward()
    before = [tensor.grad.clone() for tensor in (x, layer.weight, layer.bias)]  # type: ignore[union-attr]
    assert count(layer, x, backward=True).backward_flops == 2 * 2 * 2 * 4 * 3
    for tensor, grad in zip((x, layer.weight, layer.bias), before, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, grad)
