"""Losses of quality by target: measured by a frontier, measured by a conversion of itself, or predicted."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.base.documents import FRONTIER, MEASURED, PREDICTED, load_json
from headwise.errors import CheckpointError, StorageError
from headwise.models.specs import ModelSpec

PREDICTED_WITHIN = 2
"""A predicted KL is multiplied by this factor before it is compared with a limit. Of 100 predictions 99 were within
the factor of what was measured."""

PREDICTED_ERROR = (
    "of four models' formats 95% were within a factor of 1.5 of what was measured,"
    f" 99% within {PREDICTED_WITHIN} (docs/frontier.md)"
)
"""A phrase on the errors of predictions, where they were measured too."""

_FILES = (FRONTIER, MEASURED)
"""The files of measurements that `headwise frontier` and `headwise convert` write into their folders."""

_DIVERGED = 100.0
"""A predicted divergence, in nats a token, beyond which nothing of a model is left."""

_LARGEST = 64 * 2**20
"""The largest file that is read, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The loss of one target that a frontier measured or predicted.

    Attributes:
        target: the target as the frontier spells it, such as ``mla:0.5``.
        cache_fraction: the bytes of the target's cache over those of the source's in bfloat16.
        loss: the perplexity over the source's, less one; infinite where the model diverged. Where only the KL is
            predicted, exp(KL) − 1, the loss on text like the model's own.
        kl: KL(source ‖ conversion) in nats a token; None where it was not measured.
        file: the file that the point was read from.
        is_format: whether the source's cache was stored in a format, and nothing converted.
        label: the mechanism and sizes that were measured, such as ``MLA 96 + 32``.
        is_predicted: whether `headwise.quick_frontier` predicted it, and nothing measured it.
    """

    target: str
    cache_fraction: float
    loss: float
    kl: float | None
    file: str
    is_format: bool = False
    label: str = ""
    is_predicted: bool = False

    @property
    def loss_at_most(self) -> float:
        """The loss that is compared with a limit; a predicted one with `PREDICTED_WITHIN` times the KL.

        A prediction counts with the upper end of its error, so that no option is recommended whose loss may well be
        over the limit. A measurement of the same target takes its place.
        """
        return (1 + self.loss) ** PREDICTED_WITHIN - 1 if self.is_predicted else self.loss


def read_measured(sources: Iterable[str | Path], model: ModelSpec | None = None) -> dict[str, Measured]:
    """The measurements and predictions of frontiers, by target; see `by_target`.

    For example ``read_measured(["./out"])["mla:0.5"].loss``.

    Args:
        sources: folders that ``headwise frontier`` wrote, with ``--quick`` or without, or ``headwise convert`` with
            an evaluation; or their files.
        model: the model that the frontiers must be of, as far as the label of its attention tells; any model when
            None.

    Raises:
        StorageError: a file cannot be read.
        CheckpointError: it is no frontier, or another model's.
    """
    return by_target(
        point for source in sources for file in _files(Path(source)) for point in _read_file(file, model).values()
    )


def by_target(points: Iterable[Measured]) -> dict[str, Measured]:
    """Points by target; of several of one target the last that was measured, or the last if all are predicted.

    For example ``by_target([*read_measured(["./out"]).values(), *predicted.values()])["int4"].is_predicted``.
    """
    found: dict[str, Measured] = {}
    for point in points:
        known = found.get(point.target)
        if known is None or known.is_predicted or not point.is_predicted:
            found[point.target] = point
    return found


def _files(source: Path) -> list[Path]:
    """The files to read in a folder, measurements before predictions; a file alone where ``source`` is one."""
    if not source.is_dir():
        return [source]
    there = [source / name for name in (*_FILES, PREDICTED) if (source / name).is_file()]
    if len(there) > 1 and there[1].name == MEASURED:
        del there[1]
    return there or [source / FRONTIER]


def _read_file(file: Path, model: ModelSpec | None) -> dict[str, Measured]:
    try:
        document = load_json(file, _LARGEST)
    except (OSError, ValueError) as error:
        raise StorageError("measured", str(file), f"cannot be read: {error}") from None
    return read_points(document if isinstance(document, dict) else {}, model, name=str(file))


def read_points(
    document: Mapping[str, Any], model: ModelSpec | None = None, *, name: str = "frontier"
) -> dict[str, Measured]:
    """The measurements of one frontier's JSON, or its predictions, by target.

    For example ``read_points(headwise.frontier("smollm2-135m", "out", ...).to_dict())["mla:0.5"].loss``.

    Args:
        document: the JSON of `headwise.frontier` or `headwise.quick_frontier`.
        model: the model that the frontier must be of, as far as the label of its attention tells; any model when
            None.
        name: the name of the document's file in errors.

    Raises:
        CheckpointError: it is no frontier, or another model's.
    """
    listed = document.get("points")
    if not isinstance(listed, list):
        raise CheckpointError("measured", name, "must be the frontier.json of headwise frontier: it has no points")
    label = document.get("label")
    if model is not None and isinstance(label, str) and label and label != model.label:
        rule = f"must be this model's frontier: it measured {reprlib.repr(label)}, and the model has {model.label}"
        raise CheckpointError("measured", name, rule)
    is_predicted = document.get("is_predicted") is True
    points = (_read_point(entry, name, is_predicted=is_predicted) for entry in listed if not _is_other_method(entry))
    return {point.target: point for point in points}


def _is_other_method(entry: Any) -> bool:
    """Whether a point is of a method other than headwise's own, which `headwise convert` does not take by itself."""
    return isinstance(entry, Mapping) and entry.get("way") not in ("headwise", "plain quantisation", None)


def _read_point(entry: Any, file: str, *, is_predicted: bool) -> Measured:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("target"), str):
        raise CheckpointError("measured", file, "has a point without a target")
    target = entry["target"]
    if not target.isprintable() or " " in target:
        raise CheckpointError("measured", file, f"has no target of the name {reprlib.repr(target)}")
    fraction = _read_number(entry, "cache_fraction", file)
    if not 0 < fraction <= 4:
        raise CheckpointError(
            "measured", file, f"cache_fraction of {target} must be above 0 and at most 4, not {fraction!r}"
        )
    kl = None if entry.get("kl") is None else _read_number(entry, "kl", file)
    return Measured(
        target=target,
        cache_fraction=fraction,
        loss=_predicted_loss(kl, target, file) if is_predicted else _measured_loss(entry, file),
        kl=kl,
        file=file,
        is_format=is_predicted or entry.get("way") == "plain quantisation",
        label=str(entry.get("label", "")),
        is_predicted=is_predicted,
    )


def _measured_loss(entry: Mapping[str, Any], file: str) -> float:
    if entry.get("perplexity_ratio", 0) is None:  # JSON has no infinities
        return math.inf
    return _read_number(entry, "perplexity_ratio", file) - 1


def _predicted_loss(kl: float | None, target: str, file: str) -> float:
    if kl is not None and kl < 0:
        raise CheckpointError("measured", file, f"kl of {target} must be at least 0, not {kl!r}")
    return math.inf if kl is None or kl > _DIVERGED else math.expm1(kl)


def _read_number(entry: Mapping[str, Any], name: str, file: str) -> float:
    value = entry.get(name)
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    shown = reprlib.repr(value)
    raise CheckpointError("measured", file, f"{name} of {entry['target']} must be a number, not {shown}")
