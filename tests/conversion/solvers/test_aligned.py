"""Aligned merging: exact where one head can stand for its group, and by its own measure never worse than the mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.conversion import convert_to_grouped
from headwise.conversion.solvers import aligned
from headwise.conversion.solvers.layer import KEY_WEIGHT
from headwise.conversion.solvers.merging import Group, NormedHeads, group_heads
from headwise.conversion.solvers.rope_channels import as_rotated, to_complex
from headwise.conversion.solvers.statistics import Statistics, centred
from headwise.errors import ArgumentError, SpecError
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs import GroupedSpec, RopeSpec, as_grouped, rotated_dims
from headwise.runtime.attention.grouped import from_spec
from tests.closeness import assert_close
from tests.tiny_families import FAMILIES, MERGES, STOCK, save_family

E = 20
BIASED = ("q_proj", "k_proj", "v_proj")
BASE = GroupedSpec(hidden_size=E, num_heads=12, num_kv_heads=6, head_dim=8, v_head_dim=5)
ROPE = RopeSpec(dim=8)
SPECS = {
    "rope": replace(BASE, rope=ROPE),
    "interleaved": replace(BASE, rope=replace(ROPE, interleaved=True)),
    "partial rope, biases": replace(BASE, rope=RopeSpec(dim=4), bias=(*BIASED, "o_proj")),
    "interleaved partial rope, biases": replace(BASE, rope=RopeSpec(dim=6, interleaved=True), bias=BIASED),
    "no rope": BASE,
    "no rope, no key bias": replace(BASE, bias=("q_proj", "v_proj", "o_proj"), is_causal=False),
    "scaled, windowed": replace(BASE, rope=ROPE, softmax_scale=0.7, sliding_window=3, bias=("k_proj",)),
    "normed": replace(BASE, rope=ROPE, qk_norm="head"),
    "normed, biases, interleaved partial rope": replace(
        BASE, rope=RopeSpec(dim=4, interleaved=True), qk_norm="head", bias=BIASED
    ),
}
SHUFFLED = {3: ((0, 4), (1, 3), (2, 5)), 2: ((0, 2, 5), (1, 3, 4)), 1: ((0, 1, 2, 3, 4, 5),)}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_state(spec: GroupedSpec, seed: int = 0) -> dict[str, Tensor]:
    layer = from_spec(spec)
    return {name: normal(seed + at, *tensor.shape) for at, (name, tensor) in enumerate(layer.state_dict().items())}


def random_statistics(spec: GroupedSpec, seed: int = 0) -> Statistics:
    """Statistics of random inputs that are correlated and not centred."""
    width = spec.hidden_size
    x = normal(seed, 90, width) @ normal(seed + 1, width, width) + 2 * normal(seed + 2, 1, width)
    x = torch.cat((x, torch.ones(90, 1, dtype=torch.float64)), 1)
    energies = normal(seed + 3, 90).square()
    return Statistics(
        inputs=x.mT @ x / 90,
        keys=(x.mT * energies) @ x / energies.sum(),
        head_weight=normal(seed + 4, spec.num_heads).square(),
        distances=torch.ones(spec.num_heads, 4, dtype=torch.float64) / 4,
        queries=torch.ones((), dtype=torch.float64),
    )


def random_sensitivity(spec: GroupedSpec, seed: int = 9) -> Tensor:
    root = normal(seed, spec.hidden_size, spec.hidden_size)
    return root @ root.mT


def chosen_groups(
    state: dict[str, Tensor], spec: GroupedSpec, target: GroupedSpec, known: Statistics
) -> tuple[list[Group], float]:
    """The groups of heads to be merged, and the predicted loss of merging them."""
    _, lost = aligned._prepare(state, spec, known, None)
    groups = group_heads(lost, spec.num_kv_heads, target.num_kv_heads)
    return groups, sum(lost(group) for group in groups)


def output(spec: GroupedSpec, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    layer = from_spec(spec).double().eval()
    layer.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    with torch.no_grad():
        return layer(inputs, is_causal=spec.is_causal)


def mix_heads(
    state: dict[str, Tensor], spec: GroupedSpec, groups: tuple[tuple[int, ...], ...], seed: int = 50
) -> dict[str, Tensor]:
    """Make every head of a group a mixture of its first: complex factors at each frequency, matrices elsewhere."""
    out = dict(state)
    with_biases = [
        torch.cat((state[f"{n}.weight"], state.get(f"{n}.bias", torch.zeros(len(state[f"{n}.weight"])))[:, None]), 1)
        for n in ("k_proj", "v_proj")
    ]
    keys, values = (rows.unflatten(0, (spec.num_kv_heads, -1)).clone() for rows in with_biases)
    turned = rotated_dims(spec)
    interleaved = spec.rope is not None and spec.rope.interleaved
    for group in groups:
        for head in group[1:]:
            seed += 1
            if turned:
                pairs = to_complex(keys[group[0], :turned], 1, interleaved=interleaved)
                number = torch.complex(normal(seed, turned // 2), normal(seed + 1000, turned // 2))
                number = number.real.sgn() if spec.qk_norm else number
                keys[head, :turned] = as_rotated(pairs * number[:, None], interleaved=interleaved)[0]
            plain = spec.head_dim - turned
            mixture = normal(seed + 2000, plain, plain)
            mixture = mixture.diagonal().sgn().diag() if spec.qk_norm else mixture
            keys[head, turned:] = mixture @ keys[group[0], turned:]
            values[head] = normal(seed + 3000, spec.value_dim, spec.value_dim) @ values[group[0]]
    for name, rows in (("k_proj", keys), ("v_proj", values)):
        out[f"{name}.weight"] = rows.flatten(0, 1)[:, :-1]
        if f"{name}.bias" in state:
            out[f"{name}.bias"] = rows.flatten(0, 1)[:, -1]
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("count", SHUFFLED)
@pytest.mark.parametrize("measured", [True, False])
def test_mixtures_of_one_head_are_merged_without_loss(spec: GroupedSpec, count: int, measured: bool) -> None:
    state = mix_heads(random_state(spec), spec, SHUFFLED[count])
    target = as_grouped(spec, count)
    evidence = {"statistics": random_statistics(spec), "sensitivity": random_sensitivity(spec)} if measured else {}
    merged = convert_to_grouped(state, spec, target, **evidence)
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in from_spec(target).state_dict().items()
    }
    inputs = normal(7, 2, 9, E)
    expected = output(spec, state, inputs)
    assert_close(output(target, merged, inputs), expected, 1e-9)
    pooled = output(target, convert_to_grouped(state, spec, target, method="mean"), inputs)
    assert (pooled - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MERGES])
@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize("mixed", [True, False])
def test_every_familys_layers(name: str, count: int, mixed: bool, tmp_path: Path) -> None:
    """Every layer of a family's folder, cross-attention included; its heads are copies or mixtures of fewer."""
    options = {"num_key_value_heads": 6} if name in STOCK else {}
    checkpoint = open_checkpoint(save_family(tmp_path, name, **options))
    for cross, layers in ((False, checkpoint.spec.layers), (True, checkpoint.spec.cross_layers)):
        for index, spec in enumerate(layers):
            assert isinstance(spec, GroupedSpec)
            state = checkpoint.family.read_attention(checkpoint.read, index, spec, cross=cross)
            if mixed:
                state = mix_heads(state, spec, SHUFFLED[count])
            else:
                for own in [own for own in state if own.startswith(("k_proj", "v_proj"))]:
                    heads = state[own].unflatten(0, (count, 6 // count, -1))
                    state[own] = heads[:, :1].expand_as(heads).flatten(0, 2)
            target = as_grouped(spec, count)
            inputs = normal(index, 2, 9, spec.hidden_size)
            merged = convert_to_grouped(state, spec, target, statistics=random_statistics(spec))
            assert set(merged) == set(state)
            assert_close(output(target, merged, inputs), output(spec, state, inputs), 1e-9)


def key_error(
    state: dict[str, Tensor], made: dict[str, Tensor], spec: GroupedSpec, target: GroupedSpec, known: Statistics
) -> float:
    """``Σ_h w_h E|q·k − q̃·k̃|²``: queries and keys independent, any phase of a rotated pair, heads in order."""
    turned = rotated_dims(spec)
    scale = spec.head_dim**-1.0
    total = 0.0
    queries, keys = [], []
    for own, tensors in ((spec, state), (target, made)):
        q = tensors["q_proj.weight"].unflatten(0, (own.num_heads, -1))
        k = tensors["k_proj.weight"].unflatten(0, (own.num_kv_heads, -1))
        queries.append(q)
        keys.append(k.repeat_interleave(own.group_size, 0))
    inputs, keyed = known.inputs[:-1, :-1], known.keys[:-1, :-1]
    mean = known.keys[:-1, -1:]
    for head in range(spec.num_heads):
        pairs = [to_complex(rows[head, :turned], 1, interleaved=False)[0] for rows in (*queries, *keys)]
        sign = (1, -1)
        for a in range(2):
            for b in range(2):
                query_part = (pairs[a].conj() @ inputs.to(pairs[a].dtype) * pairs[b]).sum(-1)
                key_part = (pairs[2 + a] @ keyed.to(pairs[a].dtype) * pairs[2 + b].conj()).sum(-1)
                total += float(
                    known.head_weight[head] * scale * sign[a] * sign[b] * (query_part * key_part).real.sum() / 2
                )
        maps = [q[head, turned:].mT @ k[head, turned:] for q, k in zip(queries, keys, strict=True)]
        difference = maps[0] - maps[1]
        spread = difference @ (keyed - mean @ mean.mT) @ difference.mT
        total += float(known.head_weight[head] * scale * (inputs * spread).sum())
    return total


def value_error(
    state: dict[str, Tensor], made: dict[str, Tensor], spec: GroupedSpec, target: GroupedSpec, known: Statistics
) -> float:
    """The error of the output: ``Σ_h E‖W_o W_v x − W̃_o W̃_v x‖²``."""
    maps = []
    for own, tensors in ((spec, state), (target, made)):
        v = tensors["v_proj.weight"].unflatten(0, (own.num_kv_heads, -1)).repeat_interleave(own.group_size, 0)
        maps.append(tensors["o_proj.weight"].unflatten(1, (own.num_heads, -1)).movedim(1, 0) @ v)
    difference = maps[0] - maps[1]
    return float(((difference @ known.inputs[:-1, :-1]) * difference).sum())


def in_order(state: dict[str, Tensor], spec: GroupedSpec, order: list[int]) -> dict[str, Tensor]:
    """A layer with its key–value heads, and the query heads of each, in another order."""
    out = dict(state)
    for name, dim in (("q_proj.weight", 0), ("k_proj.weight", 0), ("v_proj.weight", 0), ("o_proj.weight", 1)):
        out[name] = state[name].unflatten(dim, (spec.num_kv_heads, -1)).index_select(dim, torch.tensor(order))
        out[name] = out[name].flatten(dim, dim + 1)
    return out


def head_weights_in_order(known: Statistics, spec: GroupedSpec, order: list[int]) -> Statistics:
    return replace(known, head_weight=known.head_weight.view(spec.num_kv_heads, -1)[order].flatten())


@given(
    st.sampled_from([(6, 3), (6, 2), (6, 1), (4, 2), (2, 1)]),
    st.sampled_from([0, 4, 8]),
    st.integers(1, 2),
    st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_its_predicted_error_is_at_most_that_of_the_mean(
    heads: tuple[int, int], turned: int, group: int, seed: int
) -> None:
    rope = RopeSpec(dim=turned) if turned else None
    spec = GroupedSpec(
        hidden_size=12, num_heads=heads[0] * group, num_kv_heads=heads[0], head_dim=8, v_head_dim=3, rope=rope
    )
    target = as_grouped(spec, heads[1])
    state, statistics = random_state(spec, seed), random_statistics(spec, seed)
    merged = convert_to_grouped(state, spec, target, statistics=statistics)
    groups, predicted = chosen_groups(state, spec, target, statistics)
    order = [head for one in groups for head in one]
    ordered, known_in_order = in_order(state, spec, order), head_weights_in_order(statistics, spec, order)

    def error(before: dict[str, Tensor], after: dict[str, Tensor], seen: Statistics) -> float:
        keys, values = (kind(before, after, spec, target, seen) for kind in (key_error, value_error))
        return KEY_WEIGHT * keys + values

    loss = error(ordered, merged, known_in_order)
    assert loss == pytest.approx(predicted, rel=1e-3)
    for method in ("mean", "first_head"):
        other = convert_to_grouped(state, spec, target, method=method)
        assert loss <= error(state, other, statistics) * (1 + 1e-5)


def test_groups_are_found_wherever_their_heads_are() -> None:
    spec = SPECS["rope"]
    for count, groups in SHUFFLED.items():
        state = mix_heads(random_state(spec), spec, groups)
        statistics = random_statistics(spec)
        chosen, lost = chosen_groups(state, spec, as_grouped(spec, count), statistics)
        assert chosen == list(groups)
        different = random_state(spec)
        assert lost < 1e-10 * chosen_groups(different, spec, as_grouped(spec, count), statistics)[1]


def test_a_small_difference_between_normed_heads_stays_small() -> None:
    """Neither the sign of a head at a frequency nor its size changes what comes out of its norm."""
    spec = SPECS["normed"]
    state = mix_heads(random_state(spec), spec, SHUFFLED[3])
    heads = state["k_proj.weight"].unflatten(0, (6, -1))
    noise = 1e-3 * normal(5, *heads.shape)
    state["k_proj.weight"] = ((heads + noise) * torch.arange(1.0, 7.0)[:, None, None]).flatten(0, 1)
    target, inputs = as_grouped(spec, 3), normal(7, 2, 9, E)
    expected = output(spec, state, inputs)
    merged = convert_to_grouped(state, spec, target, statistics=random_statistics(spec))
    assert_close(output(target, merged, inputs), expected, 2e-2)


def test_normed_heads_are_averaged_better_than_the_mean_or_the_first() -> None:
    spec = replace(SPECS["normed"], hidden_size=12)
    target = as_grouped(spec, 2)
    errors: dict[str, float] = dict.fromkeys(("aligned", "mean", "first_head"), 0.0)
    for seed in range(8):
        shared = mix_heads(random_state(spec, seed), spec, SHUFFLED[2], seed + 50)["k_proj.weight"]
        state = random_state(spec, seed)
        state["k_proj.weight"] = shared + 0.5 * state["k_proj.weight"]
        inputs = normal(seed + 90, 4, 16, 12)
        expected = output(spec, state, inputs)
        for method in errors:
            merged = convert_to_grouped(state, spec, target, method=method)
            errors[method] += float((output(target, merged, inputs) - expected).square().sum())
    assert errors["aligned"] < 0.8 * min(errors["mean"], errors["first_head"])


def test_what_all_tokens_share_of_the_values_is_in_the_outputs_bias() -> None:
    """Where every token equals the mean, the output is unchanged, whatever the values lost."""
    for name in ("no rope, no key bias", "partial rope, biases"):
        spec = SPECS[name]
        target, state, statistics = as_grouped(spec, 2), random_state(spec), random_statistics(spec)
        merged = convert_to_grouped(state, spec, target, statistics=statistics)
        average = statistics.inputs[:-1, -1].expand(1, 5, E)
        assert_close(output(target, merged, average), output(spec, state, average), 1e-9)
        other = normal(3, 1, 5, E)
        assert (output(target, merged, other) - output(spec, state, other)).abs().max() > 1e-2


def test_the_outputs_bias_leaves_the_values_room_for_the_rest() -> None:
    spec = SPECS["no rope, no key bias"]
    state, statistics = random_state(spec), random_statistics(spec)
    without = replace(spec, bias=("q_proj", "v_proj"))
    bare = {name: tensor for name, tensor in state.items() if name != "o_proj.bias"}
    sizes = []
    for own, tensors in ((spec, state), (without, bare)):
        merged = convert_to_grouped(tensors, own, as_grouped(own, 1), statistics=statistics)
        rest = replace(statistics, inputs=centred(statistics.inputs))
        sizes.append(value_error(tensors, merged, own, as_grouped(own, 1), rest))
    assert sizes[0] < 0.999 * sizes[1]


def normed_heads(seed: int) -> NormedHeads:
    energies = normal(seed, 4, 6).square()
    energies = (energies + energies[:, [2, 3, 0, 1, 4, 5]]) / 2
    x = normal(seed + 1, 40, 9)
    units = torch.tensor([0, 1, 0, 1, 4, 5])
    return NormedHeads(normal(seed + 2, 4, 6, 9), normal(seed + 3, 6), energies, units, x.mT @ x / 40)


def test_what_merging_normed_heads_loses_is_what_it_says() -> None:
    for seed in range(5):
        heads = normed_heads(seed)
        group = (0, 2, 3)
        merged, signs = heads.merge(group)
        assert (signs.abs() == 1).all()
        assert torch.equal(signs, signs[:, [2, 3, 0, 1, 4, 5]])

        def error(rows: Tensor, signs: Tensor, heads: NormedHeads = heads, group: tuple[int, ...] = group) -> float:
            def normed(rows: Tensor) -> Tensor:
                size = torch.einsum("de,ef,df->", rows, heads.moments, rows) / len(rows)
                return rows / size.sqrt() * heads.scale[:, None]

            lost = torch.stack(
                [normed(rows) * s[:, None] - normed(heads.rows[k]) for k, s in zip(group, signs, strict=True)]
            )
            energies = torch.einsum("kde,ef,kdf->kd", lost, heads.moments, lost)
            return float((heads.query_energy[list(group)] * energies).sum())

        assert heads.loss(group) == pytest.approx(error(merged, signs), rel=1e-9)
        assert error(merged, signs) < error(heads.rows[list(group)].mean(0), torch.ones_like(signs))
        assert error(merged, signs) < error(heads.rows[0], torch.ones_like(signs))
        assert heads.total >= heads.loss((0,)) >= -1e-9


def test_queries_of_normed_heads_ask_for_a_pair_together() -> None:
    """A rotation turns one dim of a pair into the other; the queries' norm makes their size irrelevant."""
    spec = SPECS["normed, biases, interleaved partial rope"]
    state, statistics = random_state(spec), random_statistics(spec)
    target = as_grouped(spec, 2)
    louder = dict(state)
    for name in ("q_proj.weight", "q_proj.bias"):
        by_head = state[name].unflatten(0, (spec.num_heads, -1))
        louder[name] = (by_head.movedim(0, -1) * torch.arange(1.0, 13.0)).movedim(-1, 0).flatten(0, 1)
    groups, lost = chosen_groups(state, spec, target, statistics)
    again, lost_again = chosen_groups(louder, spec, target, statistics)
    assert again == groups
    assert lost_again == pytest.approx(lost, rel=1e-9)
    (heads,) = aligned._divide(state, spec, statistics, None).keys
    assert isinstance(heads, NormedHeads)
    assert torch.allclose(heads.query_energy[:, [1, 0, 3, 2]], heads.query_energy[:, :4])
    assert not torch.allclose(heads.query_energy[:, [2, 3, 0, 1]], heads.query_energy[:, :4])
    assert not torch.allclose(heads.query_energy[:, [5, 4, 7, 6]], heads.query_energy[:, 4:])


def test_the_same_twice_to_the_last_bit() -> None:
    spec = SPECS["partial rope, biases"]
    results = [convert_to_grouped(random_state(spec), spec, as_grouped(spec, 2)) for _ in range(2)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_head_of_zeros_stays_finite() -> None:
    for spec in SPECS.values():
        state = random_state(spec)
        for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            state[name] = torch.zeros_like(state[name])
        merged = convert_to_grouped(state, spec, as_grouped(spec, 2))
        assert all(tensor.isfinite().all() for tensor in merged.values())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qk_norm": "full"}, "qk_norm"),
        ({"output_projection": False}, "output_projection"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_what_cannot_be_aligned_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    state = random_state(replace(BASE, qk_norm="head"))
    with pytest.raises(SpecError, match=field):
        convert_to_grouped(state, replace(BASE, **changes), as_grouped(replace(BASE, **changes), 3))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ArgumentError, match="method"):
        convert_to_grouped(random_state(BASE), BASE, as_grouped(BASE, 3), method="median")
