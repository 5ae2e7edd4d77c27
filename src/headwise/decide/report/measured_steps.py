"""Decode steps of a model that evaluations timed, for a page to show beside predicted ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from headwise.decide.advice import AS_IT_IS


def measured_steps(documents: Iterable[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """The timed decode steps of a model in evaluations' JSON, as JSON-able values.

    For example ``measured_steps([headwise.evaluate("./mla", text="text.txt").to_dict()], "./mla")[0]["seconds"]``.

    Args:
        documents: what ``headwise evaluate --json`` printed, among other results.
        source: the model, evaluated by itself or as the reference of another; its path may have changed.
    """
    found = []
    for document in documents:
        if not {"texts", "decode_ms", "context", "dtype", "threads", "device"} <= set(document):
            continue
        if document.get("engine") is not None:  # predictions are of transformers
            continue
        timed = (
            (document.get("cache") or AS_IT_IS, document.get("model"), document["decode_ms"]),
            (AS_IT_IS, document.get("against"), document.get("reference_decode_ms")),
        )
        for target, name, milliseconds in timed:
            if _is_same(name, source) and _is_positive(milliseconds) and _is_positive(document["context"]):
                found.append(
                    {
                        "target": target,
                        "context": int(document["context"]),
                        "seconds": milliseconds / 1e3,
                        "dtype": document["dtype"],
                        "where": f"{document['device']}, {document['threads']} threads, {document['dtype']}",
                    }
                )
    return found


def _is_same(name: object, source: str) -> bool:
    """Whether two names are of one model: one folder, or where one of them is gone, folders of one name."""
    if not isinstance(name, str):
        return False
    one, other = Path(name), Path(source)
    if one.exists() and other.exists():
        return one.resolve() == other.resolve()
    return one.resolve().name == other.resolve().name


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
