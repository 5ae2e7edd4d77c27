"""What a conversion did, or would do: the report that `convert` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.checkpoints import TensorInfo, dtype_name
from headwise.checkpoints.gguf import GgufCheckpoint
from headwise.conversion.budget.spread import Spread
from headwise.conversion.output.card import parameters_of
from headwise.conversion.output.formats import StockReport
from headwise.conversion.planning.plan import ConversionPlan
from headwise.cost import model as cost
from headwise.documents import as_document
from headwise.evaluation import Evaluation
from headwise.specs import read_config


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did, or would do.

    Attributes:
        model_type: of the result: the family's, or ``headwise_`` and the family's where headwise's layers are in it.
        mechanism: of the result.
        method: how the heads were made: ``copy``, ``repeat``, ``aligned``, ``mean``, ``first_head``, or for mla
            ``headwise`` or which published method.
        kv_bytes_per_token_before: cache bytes a token of the source, in the output's dtype; what a decoder keeps of
            an encoder's output is not in it.
        kv_bytes_per_token_after: of the result.
        parameters_before: learned numbers in the whole source.
        parameters_after: in the result.
        disk_bytes: of the result's weights.
        calibration_tokens: tokens of text that were looked at, those held out among them; 0 for none.
        calibration_window: tokens in each window of them.
        seconds: it took, without the evaluation; with ``dry_run``, it would take (`estimate_seconds`).
        seconds_reading: of these, spent on reading and checking weights and statistics.
        seconds_writing: on writing tensors; the rest went into solving layers and, with a text, running them.
        peak_rss_bytes: most resident memory of the process when the folder was there; None with ``dry_run``.
        evaluation: the result beside its source, on text it was not calibrated on; None where it was skipped.
        stock: what it cost to be a stock folder; None but for ``format="deepseek"``.
        spread: how an MLA's cache was spread over layers; None where that was not tried.
        notes: what a user should know of the result.
    """

    source: str
    output: str
    model_type: str
    mechanism: str
    label: str
    method: str
    dtype: str
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    parameters_before: int
    parameters_after: int
    disk_bytes: int
    calibration_tokens: int = 0
    calibration_window: int = 0
    seconds: float
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0
    peak_rss_bytes: int | None = None
    dry_run: bool = False
    evaluation: Evaluation | None = None
    stock: StockReport | None = None
    spread: Spread | None = None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


def describe(
    plan: ConversionPlan,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    notes: Sequence[str],
    **measured: Any,
) -> Conversion:
    """The report of a result.

    Args:
        plan: the conversion.
        config: of the result.
        tensors: of the result.
        notes: what a user should know.
        measured: the fields of `Conversion` that do not follow from these.
    """
    after, dtype = read_config(config), dtype_name(plan.dtype)
    return Conversion(
        model_type=config["model_type"],
        mechanism=after.mechanism,
        label=after.label,
        method=plan.method.spelling,
        dtype=dtype,
        kv_bytes_per_token_before=cost.cache_bytes_per_token(plan.before, dtype),
        kv_bytes_per_token_after=cost.cache_bytes_per_token(after, dtype),
        parameters_before=parameters_of(plan.checkpoint.tensors),
        parameters_after=parameters_of(tensors),
        disk_bytes=sum(info.nbytes for info in tensors.values()),
        notes=tuple(notes),
        **measured,
    )


def notes_before(plan: ConversionPlan, *, is_calibrated: bool, tokens: int | None, format_name: str) -> list[str]:
    """What a user should know of a conversion, whatever comes of it.

    Args:
        plan: the conversion.
        is_calibrated: whether a text or statistics are given.
        tokens: that were calibrated on; None if that is not known yet.
        format_name: of the folder.
    """
    notes = []
    inputs = plan.before.hidden_size
    if not is_calibrated and not plan.is_exact and plan.method.uses_text:
        notes.append("no calibration text: weights alone decided, and quality suffers; give one with calibrate")
    if is_calibrated and plan.is_exact:
        notes.append("nothing is lost at this size, so no text was needed")
    elif is_calibrated and tokens is not None and tokens <= inputs:
        notes.append(f"only {tokens} calibration tokens for {inputs} inputs: they decide little, and quality suffers")
    if format_name == "deepseek":
        notes.append("a deepseek_v3 latent has one number more than was asked for, a constant that its norm needs")
    if isinstance(plan.checkpoint, GgufCheckpoint) and plan.checkpoint.quantization is not None:
        notes.append(f"the source is dequantised from {plan.checkpoint.quantization}")
    return notes
