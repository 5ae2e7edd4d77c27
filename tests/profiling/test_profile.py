"""Profiles of this machine over a few sizes, their files, and what is checked with them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.cost.model import cache_bytes
from headwise.prediction import device
from headwise.profiling import Check, Point, check, measure, memory, pace, profile, write_profile
from headwise.profiling.decoder import Decoder, decode_step, filled_cache, prompt_call
from headwise.specs import read_config
from tests.cli.conftest import cli, here, refused

__all__ = ["cli", "here", "refused"]

check_module = importlib.import_module("headwise.profiling.check")  # its function has the same name


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of two sizes each."""
    names = {
        "READ": (1 << 14, 1 << 16),
        "CACHES": (1 << 14, 1 << 16),
        "CODED_CACHES": (1 << 13, 1 << 15),
        "FEW": (1, 16),
        "FEW_WEIGHTS": (1 << 10, 1 << 12),
        "MANY_TOKENS": (64, 80),
        "WEIGHTS": (1 << 12, 1 << 14),
        "PRODUCT_TOKENS": (1, 4),
        "PRODUCT_WEIGHTS": (1 << 12, 1 << 14),
        "PROMPTS": (16, 64),
        "HEADS": 4,
        "KV_HEADS": (4, 1),
        "LATENT_HEADS": (4, 8),
        "HIDDEN": (64, 128),
        "STATES": (128, 8192),
        "SHORT": 4,
        "LAYERS": (1, 2),
    }
    for name, value in names.items():
        monkeypatch.setattr(measure, name, value)
    places = {"HEADS": (4,), "LAYERS": (2,), "VOCABULARIES": (64,), "CONTEXTS": (100,), "PROMPTS": (50,)}
    for name, value in places.items():
        monkeypatch.setattr(check_module, name, value)
    monkeypatch.setattr(pace, "READING", {"caches": 1 << 16, "memory": 1 << 18})
    monkeypatch.setattr(pace, "_WEIGHTS", 1 << 12)
    monkeypatch.setattr(pace, "PRODUCTS", (64, 1 << 12))
    monkeypatch.setattr(memory, "CONTEXT", 200)
    usual = pace.Pace.measure
    monkeypatch.setattr(pace.Pace, "measure", lambda self, call, by, **_: usual(self, call, by, least=1, patience=0))


@pytest.mark.parametrize("kind", [{"num_kv_heads": 2}, {"num_kv_heads": 1}, {"latent": (48, 16)}])
def test_a_decoder_is_what_its_spec_says(kind: dict[str, Any]) -> None:
    decoder = Decoder(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=64, vocab_size=64, **kind)
    model, spec = decoder.build(torch.float32), decoder.spec()
    assert read_config(model.config.to_dict()).layers == spec.layers
    cache = filled_cache(model, spec, batch=3, tokens=10)
    assert cache.length == 10
    assert cache.nbytes == cache_bytes(spec, 11, batch=3, dtype="float32")
    decode_step(model, cache, 3)()
    assert cache.length == 10
    assert prompt_call(model, 20)().shape == (1, 1, 64)


@pytest.mark.usefixtures("few_sizes")
def test_a_profile_predicts_and_is_checked(tmp_path: Path, cli: Any) -> None:
    found = profile()
    assert set(found.device.curves) == {"float32", "bfloat16"}
    assert found.threads == torch.get_num_threads()
    file = tmp_path / "machine.toml"
    write_profile(found.device, file)
    assert device("this-machine", file).curves == found.device.curves
    said = json.loads(cli("profile", "--output", file, "--check", "--places", "1", "--json").out)
    assert said["seconds"] is None  # the profile that is there is kept
    points = said["check"]["points"]
    assert {point["mechanism"] for point in points} == {"MHA", "GQA", "MQA", "MLA"}
    assert all(point["measured"] > 0 < point["predicted"] for point in points)
    shown = cli("predict", "llama-3-8b", "--hardware", "this-machine", "--hardware-file", file).out
    assert "times: headwise profile" in shown
    shown = cli("advise", "smollm2-135m", "--hardware", "this-machine", "--hardware-file", file).out
    assert "times: headwise profile" in shown


def test_errors_and_ranks_by_hand() -> None:
    def point(mechanism: str, measured: float, predicted: float, place: int = 1) -> Point:
        return Point(
            mechanism=mechanism,
            sizes="4 × 64",
            dtype="float32",
            cache=None,
            batch=place,
            context=10,
            is_prompt=False,
            measured=measured,
            predicted=predicted,
        )

    points = (
        point("MHA", 2.0, 2.2),
        point("GQA", 1.0, 1.0),
        point("MQA", 0.98, 1.5),
        point("MHA", 1.0, 0.8, place=2),
        point("GQA", 2.0, 0.7, place=2),
    )
    found = Check(points=points)
    assert found.median_error == pytest.approx(0.2)
    # MHA–GQA and MHA–MQA of the first place, MHA–GQA of the second; GQA and MQA differ by less than 10 %.
    assert found.ranked == (2, 3)
    assert found.to_dict()["pairs"] == 3


def test_the_document_says_what_the_kept_check_measured() -> None:
    root = Path(__file__).parents[2]
    kept = json.loads((root / "benchmarks/results/profile.json").read_text())["check"]
    said = (
        f"{len(kept['points'])} points: median error {100 * kept['median_error']:.0f} %, 90th percentile"
        f" {100 * kept['high_error']:.0f} %, and {kept['pairs_in_order']} of {kept['pairs']} pairs"
    )
    assert said in " ".join((root / "docs/prediction.md").read_text().split())


def test_what_slows_the_yardstick_as_much_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = 1.0

    def slept() -> None:
        """A call that the clock below takes for 3 ms of a machine at its usual pace."""

    def clock(call: Callable[[], object]) -> float:
        call()
        return slower * (0.003 if call is slept else 0.001)

    monkeypatch.setattr(pace, "seconds", clock)
    monkeypatch.setattr(pace, "READING", {"caches": 1 << 14, "memory": 1 << 16})
    monkeypatch.setattr(pace, "_WEIGHTS", 1 << 12)
    monkeypatch.setattr(pace, "PRODUCTS", (64, 1 << 12))
    mine = pace.Pace(torch.float32)
    assert mine.reference == (0.001, 0.001, 0.001)
    slower = 1.7
    for by in ("caches", "memory", "products"):
        assert mine.median(slept, by, patience=0) == pytest.approx(0.003)
        assert mine.measure(slept, by, patience=0) == pytest.approx((0.003 * 1.7, 1.7))
    assert pace.Pace(torch.float32, mine.reference).measure(slept, "memory", patience=0)[1] == pytest.approx(1.7)
    assert (pace.bound_by(1 << 20), pace.bound_by(1 << 28)) == ("caches", "memory")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["MHA", "GQA", "MQA", "MLA"])
@pytest.mark.parametrize("inner", [1024, 2048])
def test_predicted_memory_is_that_of_all_tensors(name: str, dtype: str, inner: int) -> None:
    sizes = {"hidden_size": 512, "num_layers": 2, "num_heads": 8, "vocab_size": 512, "intermediate_size": inner}
    found = memory.memory_point(name, Decoder(**{**sizes, **check_module.MECHANISMS[name]}), dtype)
    assert abs(found.error) < 0.05


def test_bad_input(refused: Any, here: Path) -> None:
    assert "places = 0: must be from 1 to 1000" in refused("profile", "--places", "0")
    assert "output = 'no/file.toml': cannot be written" in refused("profile", "--output", "no/file.toml")
    (here / "damaged.toml").write_text("[this-machine]\n")
    assert "label" in refused("profile", "--check", "--output", "damaged.toml")


def test_checks_need_curves() -> None:
    with pytest.raises(IndexError):
        check(device("laptop"), places=1)
