"""Expert-decoded latent attention, against its definition: each query token has its own decoder."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import cost
from headwise.errors import ArgumentError, SpecError
from headwise.models.specs import RopeSpec
from headwise.runtime.attention import ExpertLatentAttention, RotaryEmbedding, build
from tests.backends import EXACT
from tests.by_hand import may_attend, project, rotate_by_hand
from tests.closeness import assert_close
from tests.runtime.attention.layers import PAIRS, ROPE, WHOLE, experts, hidden, randomized

IMPLS: list[Any] = ["expanded", "absorbed"]
ROPES = {"plain": None, "partly": ROPE, "pairs": PAIRS, "all": WHOLE}


def make(seed: int = 0, **more: Any) -> ExpertLatentAttention:
    return randomized(experts(**more), seed)


def both(seed: int = 0, **more: Any) -> list[ExpertLatentAttention]:
    return [make(seed, impl=impl, **more) for impl in IMPLS]


def kept_gates(layer: ExpertLatentAttention, query: Tensor) -> list[float]:
    """Softmax over all experts, then the largest few as they are."""
    logits = project(layer.gate_proj, query).tolist()
    powers = [math.exp(logit - max(logits)) for logit in logits]
    gates = [power / sum(powers) for power in powers]
    smallest = sorted(gates, reverse=True)[layer.spec.top_k - 1]
    return [gate if gate >= smallest else 0.0 for gate in gates]


def by_hand(
    layer: ExpertLatentAttention,
    x: Tensor,
    source: Tensor,
    kept: Tensor,
    x_at: Tensor | None = None,
    source_at: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Query by query, head by head, key by key; ``real`` are the tokens that a sequence's gates are of."""
    spec = layer.spec
    H, D, C = spec.num_heads, spec.head_dim, spec.kv_dim
    (B, S), T = x.shape[:2], source.shape[1]
    x_at = torch.arange(S) if x_at is None else x_at
    source_at = torch.arange(T) if source_at is None else source_at
    scale = 1 / math.sqrt(D) if spec.softmax_scale is None else spec.softmax_scale

    def turned(vector: Tensor, at: Tensor) -> Tensor:
        if layer.rope is None:
            return vector
        interleaved = layer.rope.spec.interleaved
        return rotate_by_hand(vector[None], at[None], layer.rope.frequencies, interleaved=interleaved)[0]

    queries, latents = project(layer.q_proj, x), project(layer.kv_a_proj, source)
    out = []
    for b in range(B):
        of_sequence = queries[b] if real is None else queries[b, real[b].bool()]
        for s in range(S):
            conditions = of_sequence.mean(0) if spec.conditioning == "sequence" else queries[b, s]
            gates = kept_gates(layer, conditions)
            heads = []
            for h in range(H):
                decoder_k = sum(g * W.T for g, W in zip(gates, layer.k_experts[h], strict=True))
                decoder_v = sum(g * W for g, W in zip(gates, layer.v_experts[h], strict=True))
                latent_head = h // (H // spec.latent_kv_heads)
                first_k, first_v = latent_head * C, (spec.latent_kv_heads + latent_head) * C
                query = turned(queries[b, s, h * D : (h + 1) * D], x_at[s])
                powers, values = [], []
                for t in range(T):
                    if kept[b, h, s, t]:
                        key = turned(latents[b, t, first_k : first_k + C] @ decoder_k, source_at[t])
                        powers.append(torch.exp(scale * (query @ key)))
                        values.append(latents[b, t, first_v : first_v + C] @ decoder_v)
                weighted = [p * v for p, v in zip(powers, values, strict=True)]
                heads.append(sum(weighted) / sum(powers) if powers else torch.zeros(D, dtype=torch.float64))
            out.append(project(layer.o_proj, torch.cat(heads)))
    return torch.stack(out).view(B, S, -1)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@torch.no_grad()
def test_it_is_its_definition(impl: Any, rope: str, top_k: int) -> None:
    layer, x = make(1, impl=impl, rope=ROPES[rope], top_k=top_k, bias=top_k == 2), hidden(2, 5)
    padding = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    for is_causal, mask in ((False, None), (True, None), (True, padding)):
        allowed = may_attend(mask, is_causal, (2, 4, 5, 5))
        out = layer(x, attention_mask=mask, is_causal=is_causal)
        assert_close(out, by_hand(layer, x, x, allowed), 1e-12)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_gates_of_a_sequence_are_its_mean_querys(impl: Any, rope: str) -> None:
    layer, x = make(2, impl=impl, rope=ROPES[rope], conditioning="sequence", bias=True), hidden(2, 5)
    everything = may_attend(None, False, (2, 4, 5, 5))
    assert_close(layer(x), by_hand(layer, x, x, everything), 1e-12)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]])
    for mask in (real, real[:, None, None], real.bool()):
        allowed = may_attend(mask, False, (2, 4, 5, 5))
        assert_close(layer(x, attention_mask=mask), by_hand(layer, x, x, allowed, real=real), 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_padding_has_no_say_in_a_sequences_gates(impl: Any) -> None:
    layer, x = make(3, impl=impl, conditioning="sequence"), hidden(2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    before, changed = layer(x, attention_mask=mask), x.clone()
    changed[mask == 0] = 100 * hidden(3, seed=4)
    assert torch.equal(layer(changed, attention_mask=mask)[mask == 1], before[mask == 1])
    assert_close(before[:1, :3], layer(x[:1, :3]), 1e-12)
    nothing = layer(x, attention_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("conditioning", ["token", "sequence"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_cross_attention_is_its_definition(impl: Any, rope: str, conditioning: str) -> None:
    layer = make(4, impl=impl, rope=ROPES[rope], conditioning=conditioning)
    x, source, mask = hidden(2, 3), hidden(2, 5, seed=5), torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    allowed = may_attend(mask, False, (2, 4, 3, 5))
    out = layer(x, key_value_states=source, attention_mask=mask)
    assert_close(out, by_hand(layer, x, source, allowed), 1e-12)
    moved = layer(x, key_value_states=source, position_ids=torch.arange(3) + 7)
    everything = may_attend(None, False, (2, 4, 3, 5))
    assert_close(moved, by_hand(layer, x, source, everything, x_at=torch.arange(3) + 7), 1e-12)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "head_dim": st.integers(2, 7),
            "kv_dim": st.integers(1, 6),
            "latent_kv_heads": st.sampled_from([1, 2, 4]),
            "num_experts": st.just(4),
            "top_k": st.integers(1, 4),
            "bias": st.sampled_from([False, True, "qkv", ["gate_proj"]]),
            "rope": st.none() | st.just(RopeSpec(dim=2)),
        }
    ),
    seed=st.integers(0, 2**32),
    past=st.integers(1, 4),
    new=st.integers(1, 3),
)
@torch.no_grad()
def test_absorbed_is_expanded_from_a_cache(sizes: dict[str, Any], seed: int, past: int, new: int) -> None:
    x, outputs = hidden(2, past + new, seed=seed), []
    for layer in both(seed, **sizes):
        cache = layer.new_cache(2, past + new)
        layer(x[:, :past], is_causal=True, cache=cache)
        outputs.append(layer(x[:, past:], is_causal=True, cache=cache, return_weights=True))
    (out, weights), (absorbed, absorbed_weights) = outputs
    assert_close(absorbed, out, 1e-11)
    assert_close(absorbed_weights, weights, 1e-11)


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_both_ways_drop_the_same_weights(rope: str) -> None:
    x, outputs = hidden(2, 9), []
    for layer in both(5, rope=ROPES[rope], dropout=0.4, backend="reference"):
        layer.train()
        torch.manual_seed(6)
        outputs.append(layer(x))
    assert_close(outputs[1], outputs[0], 1e-12)
    assert (outputs[0] - make(5, rope=ROPES[rope])(x)).abs().max() > 0.01


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("conditioning", ["token", "sequence"])
@torch.no_grad()
def test_every_backend_is_the_reference(impl: Any, conditioning: str) -> None:
    x, mask = hidden(2, 11), torch.ones(2, 11, dtype=torch.bool)
    mask[1, :3] = False
    expected = make(6, impl=impl, conditioning=conditioning, backend="reference")(x, attention_mask=mask)
    for backend in EXACT:
        layer = make(6, impl=impl, conditioning=conditioning, backend=backend)
        assert_close(layer(x, attention_mask=mask), expected, 1e-12)


@torch.no_grad()
def test_heads_that_share_a_latent_read_the_same_one() -> None:
    layer, x = make(7, latent_kv_heads=2), hidden(1, 5)
    before = layer(x, return_weights=True)[1]
    layer.kv_a_proj.weight[:5] += 1  # the first key latent: of heads 0 and 1
    after = layer(x, return_weights=True)[1]
    assert [torch.equal(before[:, h], after[:, h]) for h in range(4)] == [False, False, True, True]


@torch.no_grad()
def test_kept_gates_are_not_renormalised() -> None:
    """Two experts of the same decoder, one kept: half of what both would give."""
    one, two = make(8, num_experts=2, top_k=1), make(8, num_experts=2, top_k=2)
    for layer in (one, two):
        layer.k_experts[:, 1], layer.v_experts[:, 1] = layer.k_experts[:, 0], layer.v_experts[:, 0]
        layer.gate_proj.weight.zero_()
    x = hidden(2, 1)  # one token attends to itself whatever its score
    assert_close(one(x), two(x) / 2, 1e-12)


@torch.no_grad()
def test_auto_takes_the_fewer_flops() -> None:
    x, layers = hidden(2, 30), [make(9, impl=impl, rope=WHOLE, kv_dim=24) for impl in (*IMPLS, "auto")]
    outputs = [layer(x, is_causal=True) for layer in layers]
    flops = [cost.forward_flops(layers[0].spec, 30, impl=impl) for impl in IMPLS]
    best, other = (0, 1) if flops[0] < flops[1] else (1, 0)
    assert torch.equal(outputs[2], outputs[best])
    assert not torch.equal(outputs[2], outputs[other])


class Largest(TorchDispatchMode):
    """The most values any operator gave."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rope", [None, RopeSpec(dim=8), RopeSpec(dim=32)])
@torch.no_grad()
def test_no_token_meets_more_than_one_decoder_at_a_time(impl: Any, rope: RopeSpec | None) -> None:
    S, H, D, C, X = 64, 4, 32, 32, 8
    layer = ExpertLatentAttention(128, H, latent_kv_heads=2, kv_dim=C, num_experts=X, top_k=2, rope=rope, impl=impl)
    with Largest() as largest:
        layer(torch.randn(1, S, 128), is_causal=True)
    parameters, states = X * H * C * D, S * X * H * max(C, D) if impl == "absorbed" else S * H * max(D, S)
    assert 0 < largest.values <= max(parameters, states)
    assert max(parameters, states) * 16 <= S * X * H * C * D


@torch.no_grad()
def test_the_guides_shapes() -> None:
    layer = ExpertLatentAttention(512, 8, latent_kv_heads=2, kv_dim=64)
    assert (layer.spec.num_experts, layer.spec.top_k, layer.spec.head_dim) == (8, 2, 64)
    out, weights = layer(torch.randn(2, 10, 512), is_causal=True, return_weights=True)
    assert (out.shape, weights.shape) == ((2, 10, 512), (2, 8, 10, 10))
    assert_close(weights.sum(-1), torch.ones(2, 8, 10), 1e-5)
    assert [tuple(buffer.shape) for buffer in layer.new_cache(2, 10).buffers] == [(2, 2, 10, 64)] * 2


def test_gates_of_a_sequence_refuse_what_must_not_look_ahead() -> None:
    layer, x = experts(conditioning="sequence").double(), hidden(2, 4)
    assert layer.spec.is_causal is False
    rule = 'must not be given with conditioning="sequence", whose gates see every token; use "token"'
    cases: list[tuple[dict[str, Any], str]] = [
        ({"is_causal": True}, "is_causal = True"),
        ({"cache": layer.new_cache(2, 4)}, "cache = True"),
    ]
    heads = layer.spec.num_heads
    for size in ((1, 1, 4, 4), (1, heads, 1, 4)):
        rows = f"attention_mask shape = {size}: with a row for each query or head {rule}"
        with pytest.raises(ArgumentError, match=re.escape(rows)):
            layer(x, attention_mask=torch.ones(size).bool())
    for call, said in cases:
        with pytest.raises(ArgumentError, match=re.escape(f"{said}: {rule}")):
            layer(x, **call)
    layer(x, attention_mask=torch.ones(4).bool()[None, None, None])


def test_a_rotation_refuses_positions_with_gaps() -> None:
    layer, x = experts(rope=ROPE).double(), hidden(2, 4)
    cache = layer.new_cache(2, 4)
    for ids in (torch.tensor([0, 1, 3, 4]), torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])):
        with pytest.raises(ArgumentError, match=r"position_ids = .*: must have no gaps: keys are rotated"):
            layer(x, position_ids=ids, cache=cache)
    tables = RotaryEmbedding(ROPE)(torch.arange(4)[None], torch.float64, 4)
    with pytest.raises(
        ArgumentError,
        match=r"position_embeddings = 'given': must be None: the layer computes its own; positions must have no gaps",
    ):
        layer(x, position_embeddings=tables, cache=cache)
    assert cache.length == 0
    without = experts().double()
    assert torch.equal(without(x, position_ids=torch.tensor([0, 9, 3, 4])), without(x))


@torch.no_grad()
def test_only_distances_matter_to_a_rotation() -> None:
    for layer in both(10, rope=WHOLE):
        x = hidden(2, 5)
        assert_close(layer(x, position_ids=torch.arange(5) + 1000), layer(x), 1e-9)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"latent_kv_heads": 3}, SpecError, "latent_kv_heads = 3: must divide num_heads = 4"),
        ({"top_k": 4}, SpecError, "top_k = 4: must be at most num_experts = 3"),
        ({"top_k": 0}, SpecError, "top_k = 0: must be a whole number of at least 1"),
        ({"num_experts": 0}, SpecError, "num_experts = 0: must be a whole number of at least 1"),
        ({"kv_dim": 0}, SpecError, "kv_dim = 0: must be a whole number of at least 1"),
        ({"conditioning": "batch"}, SpecError, "conditioning = 'batch': must be one of token, sequence"),
        ({"rope": RopeSpec(dim=8)}, SpecError, "rope dim = 8: must be at most head_dim = 6"),
        ({"bias": "hf"}, SpecError, "bias = 'hf': must be True, False, one of ['qkv'] or projection names"),
        ({"bias": ["k_experts"]}, SpecError, "bias = 'k_experts': must name one of ['q_proj', 'kv_a_proj', 'gate"),
        ({"impl": "folded"}, ArgumentError, "impl = 'folded': must be auto, expanded or absorbed"),
        ({"dropout": 1.5}, ArgumentError, "dropout = 1.5: must be at least 0 and below 1"),
        ({"backend": "fa2"}, ArgumentError, "backend = 'fa2': must be one of auto, reference, sdpa, packed"),
    ],
)
def test_what_cannot_be_made(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        experts(**changes)


@pytest.mark.parametrize("conditioning", ["token", "sequence"])
def test_build_makes_it_again(conditioning: Any) -> None:
    spec = experts(conditioning=conditioning, rope=PAIRS, bias=True, softmax_scale=0.5).spec
    layer = build(spec, impl="absorbed")
    assert isinstance(layer, ExpertLatentAttention)
    assert (layer.spec, layer.impl) == (spec, "absorbed")
