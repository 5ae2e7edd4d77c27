"""Arguments of a wrong type are refused with one line, before any work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import headwise
from headwise.base.type_checks import checked_types
from headwise.errors import ArgumentError


@checked_types
def example(
    source: str | Path,
    *,
    several: str | Path | Sequence[str | Path] | None = None,
    names: Collection[str] = (),
    count: int = 1,
    share: float | None = None,
    flag: bool = False,
    way: Literal["one", "two"] = "one",
    told: Callable[[str], None] | None = None,
) -> str:
    """Its docstring."""
    return f"{source}"


def test_what_fits_goes_through() -> None:
    assert example("a", several=("b", Path("c")), names={"d"}, count=2, share=1, flag=True, way="two") == "a"
    assert example(Path("a"), several=None, names=["x"], share=0.5, told=print) == "a"
    assert (example.__name__, example.__doc__) == ("example", "Its docstring.")
    with pytest.raises(TypeError, match=r"^example\(\) missing 1 required"):
        example()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"source": 5}, "source = 5: must be a string or a path"),
        ({"several": 5}, "several = 5: must be a string, a path, several, each a string or a path or None"),
        ({"several": [5]}, r"several = \[5\]: must be"),
        ({"several": b"x"}, "several = b'x': must be"),
        ({"names": "refit"}, "names = 'refit': must be several, each a string"),
        ({"names": None}, "names = None: must be several"),
        ({"count": "2"}, "count = '2': must be a whole number"),
        ({"count": 2.5}, "count = 2.5: must be a whole number"),
        ({"count": True}, "count = True: must be a whole number"),
        ({"share": "0.5"}, "share = '0.5': must be a number or None"),
        ({"share": True}, "share = True: must be a number or None"),
        ({"flag": 1}, "flag = 1: must be True or False"),
        ({"way": "three"}, "way = 'three': must be one or two"),
    ],
)
def test_what_does_not_is_named(bad: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{line}"):
        example(**{"source": "a", **bad})


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        (headwise.convert, {"to": 5}),
        (headwise.convert, {"to": "mqa", "without": "refit"}),
        (headwise.convert, {"to": "mla", "kv_budget": "0.5"}),
        (headwise.convert, {"to": "mqa", "evaluate": None}),
        (headwise.calibrate, {"calibrate": 5}),
        (headwise.frontier, {"calibrate": "x", "targets": "mqa"}),
    ],
)
def test_of_the_public_functions(function: Callable[..., Any], bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"^{list(bad)[-1]} = "):
        function(tmp_path / "source", tmp_path / "out", **bad)


def test_a_source_is_a_name_or_a_path() -> None:
    for function, options in ((headwise.load, {}), (headwise.evaluate, {"text": "a.txt"})):
        with pytest.raises(ArgumentError, match="= 5: must be a string"):
            function(5, **options)  # type: ignore[operator]
