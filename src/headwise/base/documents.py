"""Results as JSON documents, and the names of the files that keep them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from headwise.base.disk import open_regular

MEASURED = "measured.json"
"""The file of a converted folder with what its conversion measured of it."""

FRONTIER = "frontier.json"
"""The file of a frontier's folder with what it measured."""

PREDICTED = "predicted.json"
"""The file of a frontier's folder with what formats of the cache are predicted to lose."""

MIGRATION = "migration.json"
"""The file of a model folder that holds the sizes that `headwise.migrate` tried."""

HEALING = "healing.json"
"""The file of a healed folder that holds the report of its training."""

RECORDS = (MEASURED, MIGRATION, HEALING)
"""What was measured of a model, which a model that is made of it does not inherit."""


def as_document(result: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON-able values, by name; nested results are converted by their ``to_dict``.

    Args:
        result: an instance of a dataclass.
    """
    return {field.name: plain(getattr(result, field.name)) for field in fields(result)}


def read_document(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file or it is not whole."""
    with suppress(OSError, ValueError):
        with open_regular(file) as opened:
            document = json.load(opened)
        if isinstance(document, dict):
            return document
    return None


def load_json(file: Path, largest: int) -> Any:
    """The value in a JSON file, which may be anybody's.

    For example ``load_json(Path("./model/config.json"), 1 << 20)["model_type"]``.

    Args:
        file: a regular file.
        largest: the most bytes that it may have.

    Raises:
        OSError: the file is no regular one, or cannot be read.
        ValueError: it is larger, or not UTF-8 JSON of a nesting within reason.
    """
    with open_regular(file) as opened:
        content = opened.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"must have at most {largest:,} bytes")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def plain(value: Any) -> Any:
    """Convert a field of a result to JSON-able values, by its ``to_dict`` where it has one."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return as_document(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
