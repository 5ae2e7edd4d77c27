"""The benchmark that the guides describe: its numbers are those of the layers."""

from __future__ import annotations

import pytest
import torch

from headwise import cost
from headwise.errors import ArgumentError
from headwise.runtime.attention import build
from headwise.study.audit import bench_mechanisms
from headwise.study.audit.mechanisms import mechanisms, similarity

NAMES = ["MHA", "MQA", "GQA-2", "MLA-32", "latent-32"]


def test_each_mechanism_is_measured_at_each_length() -> None:
    report = bench_mechanisms(hidden_size=64, num_heads=4, lengths=[8, 16], batch=2, passes=2)
    assert [(row.mechanism, row.length) for row in report.rows] == [(name, n) for n in (8, 16) for name in NAMES]
    for row in report.rows:
        spec = mechanisms(64, 4)[row.mechanism]
        layer = build(spec)
        cache = layer.new_cache(2, row.length)
        assert row.cache_bytes == sum(buffer.nbytes for buffer in cache.buffers)
        assert row.parameters == sum(parameter.numel() for parameter in layer.parameters()) == cost.parameters(spec)
        assert row.ms > 0
        assert row.speedup == pytest.approx(report.row("MHA", row.length).ms / row.ms)
        assert row.peak_bytes >= 2 * row.length * 64 * 4  # the output at least
    assert report.to_dict()["rows"][0]["mechanism"] == "MHA"


def test_independent_layers_share_nothing_and_converted_ones_much() -> None:
    report = bench_mechanisms(hidden_size=64, num_heads=4, lengths=[32], passes=1)
    for row in report.rows:
        if row.independent is not None:
            assert abs(row.independent.cosine) < 0.3
            assert row.independent.relative_error > 0.9
        if row.converted is not None:
            assert row.converted.cosine > 0.4
            assert row.converted.relative_error < 0.95
    assert report.row("latent-32", 32).converted is None


def test_the_same_output_is_wholly_similar() -> None:
    states = torch.randn(2, 3, 4)
    assert similarity(states, states).relative_error == 0
    assert similarity(2 * states, states).cosine == pytest.approx(1)
    assert similarity(2 * states, states).relative_error == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_heads": 3}, "num_heads"),
        ({"hidden_size": 100}, "num_heads"),
        ({"lengths": [0]}, "length"),
        ({"passes": 0}, "passes"),
        ({"batch": 0}, "batch"),
        ({"device": "nowhere"}, "device"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        bench_mechanisms(**{"lengths": [4], **options})  # type: ignore[arg-type]
