"""Options classes: checks of types and rules, identity, docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from headwise.base.options import (
    STAGES,
    CalibrateOptions,
    ConvertOptions,
    EvaluateOptions,
    FrontierOptions,
    MigrateOptions,
    Options,
    PlantedOptions,
    PrepareOptions,
    at_least,
    declarations,
    not_empty,
    option,
)
from headwise.errors import ArgumentError


class PlaceOptions(Options):
    """Where it runs."""

    device: str = option("device to run on", default="cpu", identity=False)


class ReadOptions(PlaceOptions):
    """How a text is read.

    In two paragraphs.
    """

    texts: str | Sequence[str] = option("a file, or several", rule=not_empty("must be at least one file"))
    windows: int | None = option("how many windows of each", default=6, rule=at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.windows == 13:
            raise ArgumentError("windows", 13, "brings bad luck")


def test_they_are_frozen_and_equal_by_value() -> None:
    options = ReadOptions(texts="a.txt")
    assert (options.texts, options.windows, options.device) == ("a.txt", 6, "cpu")
    assert options == ReadOptions(texts="a.txt", windows=6)
    with pytest.raises(FrozenInstanceError):
        options.windows = 7  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'texts'"):
        ReadOptions()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"texts": 5}, "texts = 5: must be a string or several, each a string"),
        ({"texts": []}, r"texts = \[\]: must be at least one file"),
        ({"windows": 0}, "windows = 0: must be at least 1"),
        ({"windows": "6"}, "windows = '6': must be a whole number or None"),
        ({"windows": 13}, "windows = 13: brings bad luck"),
        ({"device": None}, "device = None: must be a string"),
    ],
)
def test_a_value_outside_its_rule_is_named(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{line}$"):
        ReadOptions(**{"texts": "a.txt", **given})
    assert ReadOptions(texts="a.txt", windows=None).windows is None  # no rule asks about None


def test_options_of_others() -> None:
    task = ReadOptions(texts="a.txt", windows=2, device="cuda")
    assert PlaceOptions.of(task) == PlaceOptions(device="cuda")
    assert ReadOptions.of(task, texts="b.txt", device="cpu") == ReadOptions(texts="b.txt", windows=2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'texts'"):
        ReadOptions.of(PlaceOptions())


DIFFERENT = {
    "calibrate": "a conversion can do without",
    "text": "predicted, several; planted in, one",
    "context": "of decoding; of a planted fact",
    "dtype": "of converted models; of models that are run",
    "file": "of choices; of questions and passages",
    "device": "of a conversion; of an evaluation alone",
    "evaluate": "convert can leave it out",
    "overwrite": "a model; statistics",
}
"""Names that two classes declare, and how the two options differ."""


def test_an_option_is_declared_once() -> None:
    modules = [importlib.import_module(f"headwise.base.options.{name}") for name in ("convert", "evaluate")]
    kinds = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    kinds -= {MigrateOptions, PrepareOptions}  # which say the same of other texts and outputs
    declared = Counter(name for kind in kinds if issubclass(kind, Options) for name in inspect.get_annotations(kind))
    assert {name for name, times in declared.items() if times > 1} == {*DIFFERENT}
    assert max(declared.values()) == 2


def test_identity_is_what_makes_another_result() -> None:
    assert ReadOptions(texts="a.txt", device="cuda").identity() == {"texts": "a.txt", "windows": 6}


def test_own_fields_stand_before_inherited_ones_and_have_their_help() -> None:
    declared = declarations(ReadOptions)
    assert list(declared) == ["texts", "windows", "device"]
    assert (declared["windows"].annotation, declared["windows"].default) == ("int | None", 6)
    assert ReadOptions.__doc__ == (
        "How a text is read.\n\nIn two paragraphs.\n\nArgs:\n    texts: a file, or several.\n"
        "    windows: how many windows of each.\n    device: device to run on."
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"to": "mlaa"}, "to = 'mlaa': must be mha, gqa:K, mqa, mla or same, K the number of key–value heads"),
        ({"kv_budget": 7.0}, "kv_budget = 7.0: must be a fraction above 0 and at most 1"),
        ({"kv_budget": float("nan")}, "kv_budget = nan: must be a fraction above 0 and at most 1"),
        ({"calibration_tokens": 1}, "calibration_tokens = 1: must be at least 2"),
        ({"calibration_window": 1}, "calibration_window = 1: must be at least 2"),
        ({"evaluation_windows": 0}, "evaluation_windows = 0: must be at least 1"),
        (
            {"without": ["refit", "x"]},
            "without = 'x': must be one of recall, starts, sensitivity, spread, channels, sequence, refine, refit",
        ),
    ],
)
def test_options_of_a_conversion_refuse_by_themselves(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{line}$"):
        ConvertOptions(**{"to": "mla", **given})
    assert ConvertOptions(to=" GQA:2 ", kv_budget=1, without=STAGES).without == STAGES


def test_options_of_other_functions_refuse_by_themselves() -> None:
    for kind in (CalibrateOptions, FrontierOptions):
        for name in ("calibration_tokens", "calibration_window"):
            with pytest.raises(ArgumentError, match=f"^{name} = 1: must be at least 2$"):
                kind(calibrate="a.txt", **{name: 1})
    with pytest.raises(ArgumentError, match=r"^windows = 0: must be at least 1$"):
        FrontierOptions(calibrate="a.txt", windows=0)


def test_the_options_of_evaluations() -> None:
    assert EvaluateOptions(text=["a.txt"]).windows == 6
    for given in ({"trials": 0}, {"codes": 1}, {"depths": ()}, {"depths": (0.5, 1.5)}, {"context": 2.5}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(given))} = "):
            PlantedOptions(text="a.txt", **given)


def test_they_import_no_torch() -> None:
    code = "import sys, headwise.base.options; sys.exit(not {'torch', 'typer', 'numpy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_of_numpy_become_pythons() -> None:
    options = ConvertOptions(to="mla", kv_budget=np.float32(0.5), calibration_tokens=np.int64(4096))
    assert (type(options.kv_budget), type(options.calibration_tokens)) == (float, int)
    assert json.dumps(options.identity()) == json.dumps(
        ConvertOptions(to="mla", kv_budget=0.5, calibration_tokens=4096).identity()
    )
