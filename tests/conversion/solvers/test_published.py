"""The published methods are lossless at full width, and follow their papers step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import headwise
from headwise.conversion.methods import Evidence
from headwise.conversion.methods.first_head import first_head
from headwise.conversion.methods.mha2mla import mha2mla
from headwise.conversion.methods.random_heads import METHOD as RANDOM
from headwise.conversion.methods.transmla import rotate_rope, transmla
from headwise.conversion.solvers.orthogonal_channels import principal, share_out
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, LatentSpec, RopeSpec, as_grouped, as_latent
from headwise.runtime.attention import RotaryEmbedding
from headwise.runtime.attention.base import constructor_arguments
from headwise.runtime.hf import HostedLatentAttention
from tests.closeness import assert_close
from tests.conversion.test_lossless import MODELS
from tests.real_models import save_tiny

Tensors = dict[str, torch.Tensor]
Method = Callable[[Tensors, GroupedSpec, LatentSpec, torch.Tensor], tuple[Tensors, list[int]]]

METHODS: dict[str, Method] = {
    "mha2mla": lambda state, source, target, _: mha2mla(state, source, target),
    "mha2mla, norms on text": lambda state, source, target, gram: mha2mla(state, source, target, moments=gram),
    "transmla": lambda state, source, target, gram: transmla(state, source, target, moments=gram),
}


def random_gram(size: int, seed: int) -> torch.Tensor:
    x = torch.randn(3 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.mT @ x / len(x)


def widest(source: GroupedSpec) -> LatentSpec:
    """Every channel rotated, and a latent as wide as the values."""
    K = source.num_kv_heads
    return as_latent(source, K * source.value_dim, K * source.head_dim)


# --- whole models at full width ---


@torch.inference_mode()
def logits_before_and_after(folder: Path, method: Method, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint, model = open_checkpoint(folder), headwise.load(folder)
    before = model(ids).logits
    for index, layer in enumerate(checkpoint.spec.layers):
        assert isinstance(layer, GroupedSpec)
        state = checkpoint.family.read_attention(checkpoint.read, index, layer)
        target = widest(layer)
        tensors, channels = method(state, layer, target, random_gram(layer.hidden_size + 1, index))
        hosted = HostedLatentAttention(target, model.config, index, channels).double().eval()
        hosted.load_state_dict(tensors)
        model.model.layers[index].self_attn = hosted
    return before, model(ids).logits


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", list(MODELS))
def test_at_full_width_nothing_is_lost(name: str, method: str, tmp_path: Path) -> None:
    model_type, overrides = MODELS[name]
    folder = save_tiny(tmp_path / "source", model_type, **overrides)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = logits_before_and_after(folder, METHODS[method], ids)
    assert_close(after, before, 1e-9)


def folded(state: Tensors, source: GroupedSpec, target: LatentSpec, gram: torch.Tensor) -> tuple[Tensors, list[int]]:
    return transmla(state, source, target, moments=gram, freqfold=2)


@pytest.mark.parametrize(("theta", "lossless"), [(1.0, True), (10000.0, False)])
def test_a_fold_is_exact_when_its_frequencies_are_one(theta: float, lossless: bool, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    folder = save_tiny(tmp_path / "source", "llama", **rope)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = logits_before_and_after(folder, folded, ids)
    error = float((after - before).abs().max() / before.abs().max())
    assert error < 1e-9 if lossless else error > 1e-3


# --- one layer, against its paper written out ---

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "half-split": RopeSpec(dim=8),
    "interleaved": RopeSpec(dim=8, interleaved=True),
    "yarn": RopeSpec(dim=8, rope_type="yarn", parameters=tuple(YARN.items()), max_position_embeddings=256),
}


class Example:
    """One random layer (H 4, K 2, D 8, V 6, E 12, with biases), its input, and its pieces by head and frequency."""

    def __init__(self, rope: str, seed: int = 0) -> None:
        self.spec = GroupedSpec(
            hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, rope=ROPES[rope], bias="qkv"
        )
        torch.manual_seed(seed)
        shapes = {"q_proj": (32, 12), "k_proj": (16, 12), "v_proj": (12, 12), "o_proj": (12, 24)}
        self.state = {f"{name}.weight": torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            self.state[f"{name}.bias"] = torch.randn(shapes[name][0], dtype=torch.float64)
        self.x = torch.cat((torch.randn(30, 12), torch.ones(30, 1)), dim=1).double()
        self.gram = self.x.mT @ self.x / len(self.x)
        self.rotary = RotaryEmbedding(ROPES[rope])

    def weight(self, name: str) -> torch.Tensor:
        """Rows with the bias as their last column."""
        return torch.cat((self.state[f"{name}.weight"], self.state[f"{name}.bias"][:, None]), dim=1)

    def pair_rows(self, name: str, head: int, f: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two rows of a head that turn together at frequency f."""
        rows = self.weight(name)[8 * head : 8 * head + 8]
        return (rows[2 * f], rows[2 * f + 1]) if self.spec.rope.interleaved else (rows[f], rows[f + 4])

    def pair(self, name: str, head: int, f: int) -> torch.Tensor:
        """A rotated pair of one head at frequency f, ``[T]`` complex."""
        first, second = self.pair_rows(name, head, f)
        return torch.complex(self.x @ first, self.x @ second)

    def values(self) -> torch.Tensor:
        return self.x @ self.weight("v_proj").mT

    def run(self, target: LatentSpec, tensors: Tensors, channels: list[int]) -> torch.Tensor:
        """The converted layer's output ``[T, E]``, causal."""
        rotary = RotaryEmbedding(
            RopeSpec(dim=target.qk_rope_head_dim), [self.rotary.frequencies[channel] for channel in channels]
        )
        rotary.attention_scaling = self.rotary.attention_scaling
        layer = headwise.MultiHeadLatentAttention(
            **constructor_arguments(target, headwise.MultiHeadLatentAttention) | {"rope": rotary}
        ).double()
        layer.load_state_dict(tensors)
        with torch.inference_mode():
            out: torch.Tensor = layer(self.x[None, :, :12], is_causal=True)
        return out[0]

    def attend(self, scores: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """The output from each head's scores ``[T, T]``, before the scale and softmax."""
        scale = self.rotary.attention_scaling**2 * 8**-0.5
        later = torch.ones(30, 30).triu(1).bool()
        heads = [
            (score * scale).masked_fill(later, -torch.inf).softmax(-1) @ values[:, 6 * (h // 2) : 6 * (h // 2) + 6]
            for h, score in enumerate(scores)
        ]
        return torch.cat(heads, dim=1) @ self.state["o_proj.weight"].mT

    def turned(self, q: torch.Tensor, k: torch.Tensor, f: int | None) -> torch.Tensor:
        """``Re conj(q_i) k_j e^{iθ(j − i)}`` for all i and j; without rotation where ``f`` is None."""
        theta = 0.0 if f is None else self.rotary.frequencies[f]
        position = torch.arange(30, dtype=torch.float64)
        turn = torch.polar(torch.ones_like(position), theta * position)
        return ((q * turn).conj()[:, None] * (k * turn)[None]).real


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize(("rope_dim", "rank"), [(8, 9), (6, 3), (16, 5)])
def test_mha2mla_written_out(rope: str, rope_dim: int, rank: int) -> None:
    example = Example(rope)
    target = as_latent(example.spec, rank, rope_dim)
    output = example.run(target, *mha2mla(example.state, example.spec, target, moments=example.gram))

    def size(name: str, head: int, f: int) -> float:
        return float(example.pair(name, head, f).abs().square().mean().sqrt())

    kept: set[tuple[int, int]] = set()
    score = {
        (k, f): size("k_proj", k, f) * (size("q_proj", 2 * k, f) + size("q_proj", 2 * k + 1, f))
        for k in range(2)
        for f in range(4)
    }
    for k in range(2):
        kept |= {(k, f) for f in sorted(range(4), key=lambda f: -score[k, f])[: rope_dim // 4]}
    if rope_dim % 4:
        kept.add(max((pair for pair in score if pair not in kept), key=score.__getitem__))

    dropped = [pair for pair in score if pair not in kept]
    rows = [row for pair in dropped for row in example.pair_rows("k_proj", *pair)]
    stacked = torch.cat((torch.stack(rows), example.weight("v_proj"))) if rows else example.weight("v_proj")
    U, S, V = torch.linalg.svd(stacked, full_matrices=False)
    decoded = example.x @ (U[:, :rank] * S[:rank] @ V[:rank]).mT

    scores = []
    for h in range(4):
        total = torch.zeros(30, 30, dtype=torch.float64)
        for f in range(4):
            q = example.pair("q_proj", h, f)
            if (h // 2, f) in kept:
                total += example.turned(q, example.pair("k_proj", h // 2, f), f)
            else:
                at = 2 * dropped.index((h // 2, f))
                total += example.turned(q, torch.complex(decoded[:, at], decoded[:, at + 1]), None)
        scores.append(total)
    assert_close(output, example.attend(scores, decoded[:, len(rows) :]), 1e-9)


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("fold", [1, 2, 4])
@pytest.mark.parametrize(("rope_dim", "rank"), [(8, 9), (4, 3), (16, 5)])
@pytest.mark.parametrize("again", [False, True], ids=["one text", "recalibrated"])
def test_transmla_written_out(rope: str, fold: int, rope_dim: int, rank: int, again: bool) -> None:
    example = Example(rope, seed=1)
    target = as_latent(example.spec, rank, rope_dim)
    # The inputs of the model that has lost rotations, whose activations the second PCA is of.
    inputs = Example(rope, seed=2).x if again else example.x
    tensors, channels = transmla(
        example.state,
        example.spec,
        target,
        moments=example.gram,
        recalibrated=inputs.mT @ inputs / len(inputs) if again else None,
        freqfold=fold,
    )
    output = example.run(target, tensors, channels)

    rotated, rest = [], []  # each component: its key channel, each head's query for it, and its frequency
    shares = None if (rope_dim // 2) % (4 // fold) else (rope_dim // 2) // (4 // fold)
    if shares is None:  # 2 rotated pairs of 4 folds: the folds whose first component is largest have them
        assert (fold, rope_dim) == (1, 4)
    firsts = []
    for start in range(0, 4, fold):
        members = [(k, f) for k in range(2) for f in range(start, start + fold)]
        z = torch.stack([example.pair("k_proj", k, f) for k, f in members], dim=1)
        samples = torch.cat((z.real, z.imag))
        _, size, components = torch.linalg.svd(samples, full_matrices=False)
        firsts.append((float(size[0]), start))
        for n, component in enumerate(components):
            queries = []
            for h in range(4):
                q = [example.pair("q_proj", h, f) * (k == h // 2) for k, f in members]
                queries.append(torch.stack(q, dim=1) @ component.to(torch.complex128))
            channel = z @ component.to(torch.complex128)
            if shares is not None and n < shares:
                rotated.append((channel, queries, start + n * fold // shares))
            else:
                rest.append((channel, queries, start if n == 0 else None))
    if shares is None:
        best = {start for _, start in sorted(firsts)[-2:]}
        rotated = [one for one in rest if one[2] in best]
        rest = [one for one in rest if one[2] not in best]
    assert sorted(channels) == sorted(f for _, _, f in rotated)

    parts = [part for channel, _, _ in rest for part in (channel.real, channel.imag)]
    keys = torch.stack(parts, dim=1) if parts else torch.zeros(30, 0, dtype=torch.float64)
    values = example.values()
    to_inputs = torch.linalg.pinv(example.x)
    calibrated_keys, calibrated_values = (inputs @ (to_inputs @ part) for part in (keys, values))
    # The authors' code compares the mean over channels of their norms over tokens.
    ratio = float(calibrated_keys.norm(dim=0).mean() / calibrated_values.norm(dim=0).mean()) if parts else 1.0
    calibrated = torch.cat((calibrated_keys / ratio, calibrated_values), dim=1)
    directions = torch.linalg.svd(calibrated, full_matrices=False)[2][:rank]
    decoded = torch.cat((keys / ratio, values), dim=1) @ directions.mT @ directions
    keys, values = decoded[:, : len(parts)] * ratio, decoded[:, len(parts) :]

    scores = []
    for h in range(4):
        total = torch.zeros(30, 30, dtype=torch.float64)
        for channel, queries, f in rotated:
            total += example.turned(queries[h], channel, f)
        for index, (_, queries, _) in enumerate(rest):
            total += example.turned(queries[h], torch.complex(keys[:, 2 * index], keys[:, 2 * index + 1]), None)
        scores.append(total)
    assert_close(output, example.attend(scores, values), 1e-9)


# --- the pieces ---


def random_keys(K: int, F: int, E: int, seed: int) -> torch.Tensor:
    return torch.randn(K, F, E, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 3)]), st.data())
def test_channels_are_orthogonal_and_uncorrelated_and_stay_in_their_fold(
    K: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    F, fold = sizes
    pairs, seed = data.draw(st.integers(1, K * F)), data.draw(st.integers(0, 10**6))
    keys, gram = random_keys(K, F, 9, seed), random_gram(9, seed + 1)
    mix = rotate_rope(keys, gram, pairs, freqfold=fold)
    M = mix.matrix.flatten(1)
    assert torch.allclose(M @ M.mT, torch.eye(K * F, dtype=torch.float64), atol=1e-12)
    assert int(mix.kept.sum()) == pairs

    folds = mix.matrix.view(F // fold, K * fold, K, F // fold, fold)
    covariance = M @ (keys.flatten(0, 1) @ gram.to(keys.dtype) @ keys.flatten(0, 1).mH).real @ M.mT
    for g in range(F // fold):
        outside = [other for other in range(F // fold) if other != g]
        assert not folds[g][:, :, outside].any()
        block = covariance[g * K * fold : (g + 1) * K * fold, g * K * fold : (g + 1) * K * fold]
        assert torch.allclose(block, block.diag().diag(), atol=1e-9 * float(block.max()))
        assert (block.diag().diff() <= 1e-9).all()
        assert all(f // fold == g for f in mix.frequency.view(F // fold, -1)[g].tolist())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_a_wider_fold_rotates_at_least_as_much_of_the_keys(K: int, each: int, seed: int) -> None:
    """Proposition 2 of TransMLA."""
    assume(each <= K)
    keys, gram = random_keys(K, 4, 9, seed), random_gram(9, seed + 1)
    total = torch.einsum("kfe,ed,kfd->", keys, gram.to(keys.dtype), keys.conj()).real
    rotated = []
    for fold in (1, 2, 4):
        mix = rotate_rope(keys, gram, 4 * each, freqfold=fold)
        channels = torch.einsum("ckf,kfe->ce", mix.matrix[mix.kept].to(keys.dtype), keys)
        rotated.append(float(torch.einsum("ce,ed,cd->", channels, gram.to(keys.dtype), channels.conj()).real / total))
    assert rotated[0] <= rotated[1] + 1e-9
    assert rotated[1] <= rotated[2] + 1e-9
    assert rotated[2] <= 1 + 1e-9


def test_the_pairs_of_a_fold_turn_at_an_even_grid_of_its_frequencies() -> None:
    keys, gram = random_keys(3, 8, 9, 0), random_gram(9, 1)
    expected = {(8, 4): range(8), (4, 4): range(0, 8, 2), (4, 2): range(0, 8, 2), (2, 4): (0, 4), (2, 8): (0, 4)}
    for (pairs, fold), frequencies in expected.items():
        mix = rotate_rope(keys, gram, pairs, freqfold=fold)
        assert mix.frequency[mix.kept].tolist() == list(frequencies)


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_shares_are_even_and_of_the_best(rows: int, width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, rows * width))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    score = torch.rand(rows, width, generator=generator)
    chosen = share_out(score, count)
    each = chosen.sum(1)
    assert int(each.sum()) == count
    assert int(each.max() - each.min()) <= 1
    for row, own in zip(score, chosen, strict=True):
        if own.any() and not own.all():
            assert row[own].min() > row[~own].max()
    more = each > count // rows
    if more.any() and not more.all():
        nexts = score.sort(1, descending=True).values[:, count // rows]
        assert nexts[more].min() > nexts[~more].max()


@given(st.integers(1, 7), st.integers(0, 10**6))
def test_principal_directions_leave_what_the_dropped_singular_values_hold(rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    x = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    basis = principal(rows, x.mT @ x, rank)
    assert torch.allclose(basis.mT @ basis, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    samples = x @ rows.mT
    left = float((samples - samples @ basis @ basis.mT).square().sum())
    assert abs(left - float(torch.linalg.svdvals(samples)[rank:].square().sum())) < 1e-8


def test_norms_of_weights_decide_without_text() -> None:
    example = Example("half-split")
    for pair in ((0, 2), (1, 1)):
        for head, f in (pair,):
            example.state["k_proj.weight"][[8 * head + f, 8 * head + f + 4]] *= 100
    target = as_latent(example.spec, 4, 4)
    assert mha2mla(example.state, example.spec, target)[1] == [2, 1]


def test_bad_arguments_are_named() -> None:
    example = Example("half-split")
    target = as_latent(example.spec, 4, 8)
    for freqfold in (0, -1, 3, 8):
        with pytest.raises(headwise.ArgumentError, match=rf"freqfold = {freqfold}: must divide the 4 frequencies"):
            transmla(example.state, example.spec, target, moments=example.gram, freqfold=freqfold)


def test_the_first_head_of_each_group_stays() -> None:
    spec = GroupedSpec(hidden_size=10, num_heads=12, num_kv_heads=6, head_dim=4, v_head_dim=3, bias="qkv")
    torch.manual_seed(0)
    shapes = {"q_proj": (48, 10), "k_proj": (24, 10), "v_proj": (18, 10), "o_proj": (10, 36)}
    before = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    before |= {f"{name}.bias": torch.randn(shapes[name][0]) for name in ("q_proj", "k_proj", "v_proj")}
    after = first_head(before, spec, as_grouped(spec, 2))
    assert torch.equal(after["k_proj.weight"], before["k_proj.weight"][[0, 1, 2, 3, 12, 13, 14, 15]])
    assert torch.equal(after["v_proj.bias"], before["v_proj.bias"][[0, 1, 2, 9, 10, 11]])
    for untouched in ("q_proj.weight", "q_proj.bias", "o_proj.weight"):
        assert after[untouched] is before[untouched]


def test_random_heads_are_as_large_as_the_sources_and_always_the_same() -> None:
    spec = GroupedSpec(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=32)
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    before = {f"{name}.weight": torch.randn(256, 64) * scale for name, scale in zip(names, (1, 3, 0.1), strict=True)}
    one, again = (RANDOM.solve_heads(before, spec, as_grouped(spec, 2), Evidence()) for _ in range(2))
    for name in names[1:]:
        drawn, source = one[f"{name}.weight"], before[f"{name}.weight"]
        assert drawn.shape == (64, 64)
        assert torch.equal(drawn, again[f"{name}.weight"])
        assert float(drawn.std() / source.std()) == pytest.approx(1, abs=0.05)
        parts = source.view(4, 64, 64)
        assert all(abs(float(torch.corrcoef(torch.stack((drawn.ravel(), p.ravel())))[0, 1])) < 0.1 for p in parts)
    assert one["q_proj.weight"] is before["q_proj.weight"]
