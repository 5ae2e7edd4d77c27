"""Functions that take an options object or its fields."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import headwise
from headwise.base.options import EvaluateOptions, Options, at_least, declarations, option, takes_options
from headwise.base.type_checks import checked_types
from headwise.conversion import convert_to_latent
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec
from headwise.study.bench import bench_decode


class ReadOptions(Options):
    """How a text is read."""

    text: str = option(f"a file of ``UTF-8`` text, named {'x' * 100}")
    windows: int = option("how many windows", default=6, rule=at_least(1))


@takes_options(ReadOptions)
@checked_types
def read(source: str, options: ReadOptions, *, loud: bool = False) -> tuple[str, ReadOptions, bool]:
    """Read a text.

    Args:
        source: a model.
        options: the keywords below as one object,
            in their place.
        loud: whether to say so.

    Returns:
        Everything.
    """
    return source, options, loud


def test_an_object_or_its_fields() -> None:
    options = ReadOptions(text="a.txt", windows=2)
    whole = ("model", options, True)
    assert read("model", options, loud=True) == whole
    assert read("model", options=options, loud=True) == whole
    assert read("model", text="a.txt", windows=2, loud=True) == whole
    assert read(source="model", options=None, text="a.txt", windows=2, loud=True) == whole
    assert read("model", None, text="a.txt") == ("model", ReadOptions(text="a.txt"), False)


@pytest.mark.parametrize(
    ("args", "keywords", "words"),
    [
        (("m",), {"text": "a", "chunks": 2}, r"read\(\) got an unexpected keyword argument 'chunks'"),
        (("m",), {}, r"read\(\) missing 1 required keyword-only argument: 'text'"),
        ((), {"text": "a"}, r"read\(\) missing 1 required positional argument: 'source'"),
        (("m", ReadOptions(text="a")), {"text": "b"}, r"read\(\) takes options or keywords, not both: text"),
    ],
)
def test_calls_that_python_would_refuse(args: tuple[Any, ...], keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"^{words}$"):
        read(*args, **keywords)


def test_values_are_held_to_types_and_rules() -> None:
    with pytest.raises(ArgumentError, match=r"^windows = 0: must be at least 1$"):
        read("m", text="a", windows=0)
    with pytest.raises(ArgumentError, match=r"^text = 5: must be a string$"):
        read("m", text=5)
    with pytest.raises(ArgumentError, match=r"^options = .*: must be ReadOptions$"):
        read("m", {"text": "a"})


def test_signature_and_help_show_every_keyword() -> None:
    assert str(inspect.signature(read)) == (
        "(source: 'str', options: 'ReadOptions | None' = None, *, text: 'str', windows: 'int' = 6,"
        " loud: 'bool' = False) -> 'tuple[str, ReadOptions, bool]'"
    )
    assert (read.__doc__ or "").splitlines() == [
        "Read a text.",
        "",
        "Args:",
        "    source: a model.",
        "    options: the keywords below as one object,",
        "        in their place.",
        "    text: a file of ``UTF-8`` text, named",
        f"        {'x' * 100}.",
        "    windows: how many windows.",
        "    loud: whether to say so.",
        "",
        "Returns:",
        "    Everything.",
    ]


def test_the_options_of_public_functions_are_public() -> None:
    functions = {
        headwise.calibrate: headwise.CalibrateOptions,
        headwise.convert: headwise.ConvertOptions,
        headwise.evaluate: headwise.EvaluateOptions,
        headwise.evaluate_choices: headwise.ChoiceOptions,
        headwise.evaluate_in_engine: headwise.EngineOptions,
        headwise.evaluate_planted: headwise.PlantedOptions,
        headwise.evaluate_retrieval: headwise.RetrievalOptions,
        headwise.evaluate_ruler: headwise.RulerOptions,
        headwise.frontier: headwise.FrontierOptions,
        headwise.heal: headwise.HealOptions,
        headwise.migrate: headwise.MigrateOptions,
        headwise.sample: headwise.SampleOptions,
    }
    for function, kind in functions.items():
        assert inspect.signature(function).parameters["options"].annotation == f"{kind.__name__} | None"
        assert inspect.signature(function).parameters.keys() >= declarations(kind).keys()
    code = "import sys, headwise; headwise.ConvertOptions(to='mqa'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (headwise.complexity, ("llama-3-8b", 1)),
        (headwise.cost.forward_flops, (GroupedSpec(hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8), 1)),
        (headwise.choose_backend, ((1, 2, 1, 16), (1, 2, 1, 16))),
        (bench_decode, ()),
        (convert_to_latent, ({}, None, None)),
        (headwise.convert, ("source", "out")),
        (headwise.calibrate, ("source", "out")),
        (headwise.frontier, ("source", "out")),
        (headwise.heal, ("model", "out")),
        (headwise.migrate, ("source", "out")),
        (headwise.sample, ("model", "own.txt")),
        (headwise.evaluate, ("source",)),
        (headwise.evaluate_choices, ("source",)),
        (headwise.evaluate_planted, ("source",)),
        (headwise.evaluate_retrieval, ("source",)),
        (headwise.evaluate_ruler, ("source",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_keyword_is_refused_in_the_name_of_the_function(function: Any, args: tuple[Any, ...]) -> None:
    given = {"statistics": None} if function is convert_to_latent else {}
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'colour'"):
        function(*args, **given, colour="red")


def test_evaluate_shows_its_keywords_and_takes_its_options() -> None:
    parameters = inspect.signature(headwise.evaluate).parameters
    assert list(parameters)[:3] == ["model", "options", "text"]
    keywords = {"text", "against", "cache", "window", "windows", "context", "continuations", "dtype", "device"}
    keywords |= {"progress", "shared"}
    assert keywords == {name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert parameters["windows"].default == 6
    for name in keywords:
        assert f"\n    {name}: " in (headwise.evaluate.__doc__ or "")
    assert headwise.EvaluateOptions is EvaluateOptions
    for task in (headwise.evaluate_choices, headwise.evaluate_retrieval):
        keywords = {"file", "against", "limit", "dtype", "device", "seed", "progress"}
        keywords |= {"cache"} if task is headwise.evaluate_choices else set()  # an encoder has no cache
        parameters = inspect.signature(task).parameters
        assert list(parameters)[:2] == ["model", "options"]
        assert keywords == {name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(ArgumentError, match=r"text = 'nowhere\.txt': could not be read"):
        headwise.evaluate("smollm2-135m", EvaluateOptions(text="nowhere.txt"))
