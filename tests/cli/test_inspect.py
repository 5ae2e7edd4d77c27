"""The output of ``headwise inspect``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headwise.cli.commands.inspect import _names_of
from headwise.models.specs import catalog
from tests.cli.conftest import Result
from tests.toy_configs import TOYS


@pytest.mark.parametrize("name", catalog())
def test_every_model_of_the_catalog_fits_a_terminal_of_80_columns(cli: Callable[..., Result], name: str) -> None:
    result = cli("inspect", name)
    assert (result.status, result.err) == (0, "")
    for line in result.out.splitlines():
        assert len(line) <= 80
        assert not re.search(r"\S…", line), "cut off"


def test_a_hybrid_model(cli: Callable[..., Result]) -> None:
    assert cli("inspect", "granite-4.0-h-tiny").out.splitlines()[:12] == [
        "granite-4.0-h-tiny: granitemoehybrid, hidden 1536",
        "layers   36 Mamba-2, 4 GQA",
        "cache    8.0 KiB a token (8,192 B, bfloat16) and 27.9 MiB of state",
        "         1.0 GiB at 131,072 tokens",
        "weights  6.9 G parameters, 1.5 G active for a token, head tied to the embedding",
        "FLOPs    2.9 G for the first token, 6.2 G at 131,072 tokens",
        "",
        "layers              attention              B/token      state     weights",
        "─────────────────────────────────────────────────────────────────────────",
        "the other 36        Mamba-2 48 × 64 × 128        0  794.0 KiB  14,642,576",
        "every 10th of 5–35  GQA 12/4 × 128           2,048              6,291,456",
        "",
    ]


def test_layers_that_differ_in_their_positions_alone_say_so(cli: Callable[..., Result]) -> None:
    out = cli("inspect", "smollm3-3b").out
    assert re.search(r"the other 27 +GQA 16/4 × 128 ", out)
    assert re.search(r"every 4th of 3–35 +GQA 16/4 × 128, no rope ", out)
    assert "no rope" not in cli("inspect", "jamba-v0.1").out


def test_a_model_whose_attention_alone_is_known(cli: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TOYS["gemma3n_text"]))
    result = cli("inspect", path)
    assert result.status == 0
    assert "GQA 8/2 × 256 shared" in result.out
    assert result.out.endswith("the whole model's weights and FLOPs are not known from this config\n")
    assert json.loads(cli("inspect", path, "--json").out)["weights"] is None


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([range(32)], ["0–31"]),
        ([[0]], ["0"]),
        ([[*range(9), *range(20, 30)]], ["0, 1 … (19)"]),
        ([[0, 1], [2, 3, 4]], ["0, 1", "2–4"]),
        ([range(0, 36, 2), range(1, 36, 2)], ["every 2nd of 0–34", "every 2nd of 1–35"]),
        ([range(2, 36, 3), range(5, 36, 6)], ["every 3rd of 2–35", "every 6th of 5–35"]),
        ([[i for i in range(26) if i % 6 != 5], range(5, 26, 6)], ["the other 22", "every 6th of 5–23"]),
        ([[2, 5, 8, 10, 12, 14], [0, 1, 3]], ["2, 5, 8, 10, 12, 14", "0, 1, 3"]),
        ([[i for i in range(40) if i % 3], range(3, 40, 6)], ["the other 26", "every 6th of 3–39"]),
        ([[*range(9), *range(20, 30)], [*range(9, 20), *range(30, 40)]], ["0, 1 … (19)", "9, 10 … (21)"]),
    ],
)  # fmt: skip
def test_layers_by_name(groups: list[list[int]], names: list[str]) -> None:
    assert _names_of([tuple(group) for group in groups]) == names


def test_an_encoder_has_no_cache_to_speak_of(cli: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}')
    out = cli("inspect", path).out
    assert "layers   2 MHA\ncache    none: every token sees every other\n" in out
