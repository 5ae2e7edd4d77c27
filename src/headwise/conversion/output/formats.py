"""What a conversion writes: its own folder, or a stock ``deepseek_v3`` one by way of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.checkpoints import Checkpoint, FolderWriter, TensorInfo, dtype_name, open_checkpoint
from headwise.conversion.budget.shared_channels import SharedPlan, common_channels
from headwise.conversion.budget.spread import Spread, spread_plan
from headwise.conversion.calibration.streams import Sequential
from headwise.conversion.loop import Study, fill
from headwise.conversion.output.deepseek import add_deepseek, deepseek_config
from headwise.conversion.planning.plan import Job
from headwise.conversion.proof import Exam
from headwise.conversion.storage.layers import LayerResults
from headwise.errors import ArgumentError
from headwise.hf import LayerwiseModel, expected_tensors
from headwise.processes import barrier, first_enters, rank
from headwise.progress import Progress

FORMATS = ("headwise", "deepseek")
TOKENS = 512
"""How many the two formats are compared on."""

Begin = Callable[[Path, type[Sequential]], Study | None]
"""Begins the conversion on a text, given a folder for activations; or what is known of the source without one."""


@dataclass(frozen=True, kw_only=True)
class StockReport:
    """What it cost to be a stock folder.

    Attributes:
        text: that the two formats were compared on; None where there was none.
        tokens: how many of it.
        logits_difference: the largest between them, in float32.
        shared_plan_error: what the layers lose with the plan they share, before any refit: nats a token on held-out
            windows, estimated and summed over layers (without sensitivities, half the squared error of their
            outputs); None without a text.
        own_plan_error: the same, were each to keep the channels that it needs most.
    """

    text: str | None = None
    tokens: int = 0
    logits_difference: float | None = None
    shared_plan_error: float | None = None
    own_plan_error: float | None = None

    def notes(self, *, in_nats: bool) -> list[str]:
        """The same in words."""
        found = []
        if self.logits_difference is not None:
            found.append(
                f"float32 logits differ by at most {self.logits_difference:.1e} from headwise's own format's, on "
                f"{self.tokens:,} tokens of text"
            )
        if self.shared_plan_error is not None and self.own_plan_error is not None:
            unit = "nats a token" if in_nats else "of squared error"
            found.append(
                f"one plan for all layers: about {self.shared_plan_error:.4f} {unit} are lost before refits, and "
                f"{self.own_plan_error:.4f} with channels of each layer's own (estimates on held-out "
                "calibration windows, all layers of one size)"
            )
        return found


class Written(NamedTuple):
    """What was written.

    Attributes:
        config: the folder's.
        tokens: that were calibrated on.
        window: tokens in each window of them.
        stock: with deepseek's format, what it cost.
        spread: how the cache was spread over layers, where that was tried.
    """

    config: dict[str, Any]
    tokens: int
    window: int
    stock: StockReport | None = None
    spread: Spread | None = None

    def notes(self, *, in_nats: bool) -> list[str]:
        """What a user should know of the format and of the plan."""
        return [
            *([] if self.stock is None else self.stock.notes(in_nats=in_nats)),
            *([] if self.spread is None else [self.spread.note]),
        ]


def plan_folder(job: Job, format: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:  # noqa: A002
    """What the folder will be, whatever channels are kept: its config and its tensors.

    Raises:
        ArgumentError: there is no such format, or the result cannot have it.
        SpecError: the source's family is one that deepseek_v3 cannot hold.
    """
    if format not in FORMATS:
        raise ArgumentError("format", format, f"must be {' or '.join(FORMATS)}")
    if format == "headwise":
        return job.config(), job.tensors
    if job.after.mechanism != "mla":
        raise ArgumentError("format", format, f"goes with mla; {job.after.mechanism} results are stock already")
    if job.published:  # which choose rotary channels layer by layer
        raise ArgumentError("format", format, f"goes with headwise's own method, not with {job.published}")
    config = deepseek_config(job.config())
    return config, {name: TensorInfo(shape, job.dtype) for name, shape in expected_tensors(config).items()}


def write_folder(
    job: Job,
    writer: FolderWriter,
    format: str,  # noqa: A002
    begin: Begin,
    *,
    run: str,
    exam: Exam,
    progress: Progress,
) -> Written:
    """Write the folder in its format, but for its card.

    Args:
        job: the conversion.
        writer: of the folder, open.
        format: of `FORMATS`; results that are not MLA are their family's own in any case.
        begin: see `Begin`.
        run: what tells this run from another.
        exam: what two formats are compared on; may be empty.
        progress: told of each layer.
    """
    if format == "deepseek":
        return _write_stock(job, writer, begin, run=run, exam=exam, progress=progress)
    study = begin(writer.work, Sequential)
    spread = None
    if isinstance(study, Sequential) and "spread" in study.stages:
        spread = spread_plan(job, study, writer.work, progress)
        job.resize(spread.sizes, spread.key_weights)
    if rank() == 0:
        writer.announce(job.tensors)
    fill(job, writer, study, progress)
    return Written(job.config(), *_looked_at(study), spread=spread)


def _write_stock(
    job: Job, writer: FolderWriter, begin: Begin, *, run: str, exam: Exam, progress: Progress
) -> Written:
    """Convert in headwise's own format within the writer's working folder, and add what that is as deepseek_v3.

    A run that is killed goes on: within the first conversion, or after it.
    """
    own, plan = writer.work / "own", LayerResults(writer.work / "plan")
    if not (own / "config.json").is_file():
        with first_enters(FolderWriter(own, job.tensors, run=run)) as inner:
            study = begin(inner.work, SharedPlan)
            job.kept = _plan(job, study, plan, progress)
            fill(job, inner, study, progress)
            if rank() == 0:
                costs = study.plan_costs() if isinstance(study, SharedPlan) else {}
                tokens, window = _looked_at(study)
                plan.save(1, {}, {"tokens": tokens, "window": window, **costs})
    kept = plan.load(1)
    about = {"tokens": 0, "window": 0} if kept is None else kept[1]
    checkpoint = open_checkpoint(own)
    config = deepseek_config({**checkpoint.config, "dtype": dtype_name(checkpoint.dtype)})
    barrier()  # all have read it before it is gone
    if rank() > 0:
        return Written(config, about["tokens"], about["window"])
    add_deepseek(writer, checkpoint, config, job.clock, progress)
    writer.note_left_out(job.checkpoint)  # the folder between has no links
    report = StockReport(shared_plan_error=about.get("shared"), own_plan_error=about.get("own"))
    if exam:
        (text, windows), *_ = exam
        ids = windows[:1, :TOKENS]
        difference = logits_difference(checkpoint, open_checkpoint(writer.folder), ids)
        report = replace(report, text=text, tokens=ids.numel(), logits_difference=difference)
    return Written(config, about["tokens"], about["window"], report)


def _plan(job: Job, study: Study | None, plan: LayerResults, progress: Progress) -> Tensor | None:
    """The channels all layers keep, once decided; None where they keep all they have."""
    if job.is_lossless:
        return None
    if (found := plan.load(0)) is not None:
        return found[0]["kept"]
    if rank() > 0 and not isinstance(study, Sequential):
        return None  # the first process needs no help
    kept = common_channels(job, study, progress)
    if rank() == 0:
        plan.save(0, {"kept": kept}, {})
    return kept


def _looked_at(study: Study | None) -> tuple[int, int]:
    """How many tokens were calibrated on, and how many in each window."""
    if isinstance(study, Sequential):
        return study.windows.numel(), study.windows.shape[1]
    return (0, 0) if study is None else (study.tokens, study.window)


@torch.no_grad()
def logits_difference(first: Checkpoint, second: Checkpoint, ids: Tensor) -> float:
    """The largest difference of two models' logits, in float32, with one layer of one of them in memory at a time.

    Args:
        first: a folder whose layers are where Llama's are.
        second: another.
        ids: ``[B, W]`` tokens.
    """
    models, states = [], []
    for checkpoint in (first, second):
        place = "model.layers.{layer}"
        model = LayerwiseModel(checkpoint, torch.float32, layer=place, attention=f"{place}.self_attn")
        hidden = model.begin(ids)
        for index in range(model.num_layers):
            hidden = model.run(index, model.layer(index), hidden)
        model.release()
        models.append(model)
        states.append(hidden)
    pieces = zip(*(model.finish_in_pieces(hidden) for model, hidden in zip(models, states, strict=True)), strict=True)
    return max(float((one - other).abs().max()) for one, other in pieces)
