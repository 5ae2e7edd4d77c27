"""Mean pooling is a mean over neighbours, with biases; repeating is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.conversion import convert_to_grouped
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, as_grouped
from headwise.runtime.attention.grouped import from_spec

SOURCE = GroupedSpec(
    hidden_size=10, num_heads=12, num_kv_heads=6, head_dim=4, v_head_dim=3, bias=("q_proj", "k_proj", "v_proj")
)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q_proj": (48, 10), "k_proj": (24, 10), "v_proj": (18, 10), "o_proj": (10, 36)}
    out = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    return out | {f"{name}.bias": torch.randn(shapes[name][0]) for name in ("q_proj", "k_proj", "v_proj")}


def test_mean_pooling_by_hand() -> None:
    before = state()
    after = convert_to_grouped(before, SOURCE, as_grouped(SOURCE, 2), method="mean")
    assert after["k_proj.weight"].shape == (8, 10)
    assert after["v_proj.bias"].shape == (6,)
    keys = before["k_proj.weight"].view(6, 4, 10)
    assert torch.allclose(after["k_proj.weight"].view(2, 4, 10)[1], (keys[3] + keys[4] + keys[5]) / 3, atol=1e-6)
    values = before["v_proj.bias"].view(6, 3)
    assert torch.allclose(after["v_proj.bias"].view(2, 3)[0], values[:3].mean(0), atol=1e-6)
    for untouched in ("q_proj.weight", "q_proj.bias", "o_proj.weight"):
        assert after[untouched] is before[untouched]


def test_repeating_by_hand() -> None:
    before = state()
    after = convert_to_grouped(before, SOURCE, as_grouped(SOURCE, 12))
    heads = after["k_proj.weight"].view(12, 4, 10)
    for index in range(12):
        assert torch.equal(heads[index], before["k_proj.weight"].view(6, 4, 10)[index // 2])


def test_a_norm_over_all_heads_is_repeated_and_pooled_with_them() -> None:
    source = replace(SOURCE, num_kv_heads=3, qk_norm="full", bias=())
    torch.manual_seed(0)
    layer = from_spec(source).double()
    before = {name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(before)
    inputs = torch.randn(2, 5, 10, dtype=torch.float64)
    repeated = as_grouped(source, 6)
    wider = from_spec(repeated).double()
    wider.load_state_dict(convert_to_grouped(before, source, repeated))
    assert torch.allclose(wider(inputs), layer(inputs), rtol=1e-12)
    again = convert_to_grouped(wider.state_dict(), repeated, source, method="mean")
    assert all(torch.allclose(again[name], before[name], rtol=1e-12) for name in before)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads = 4: must divide or be a multiple of the source's 6"),
        ({"num_kv_heads": 12, "num_heads": 24}, "must be as_grouped"),
        ({"num_kv_heads": 3, "head_dim": 8}, "only the number of key–value heads may differ"),
    ],
)
def test_a_target_that_heads_cannot_be_merged_or_repeated_to_is_refused(changes: dict[str, int], rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule):
        convert_to_grouped(state(), SOURCE, replace(SOURCE, **changes), method="mean")


def test_more_heads_that_are_no_multiple_are_refused() -> None:
    source = replace(SOURCE, num_kv_heads=3)
    with pytest.raises(ArgumentError, match="num_kv_heads = 4: must divide or be a multiple of the source's 3"):
        convert_to_grouped(state(), source, replace(source, num_kv_heads=4))
