"""`migrate`: verify that nothing is lost where nothing need be, then make the cache smaller while the loss allows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwise.base.disk import storage_errors
from headwise.base.documents import MIGRATION, as_document, finite
from headwise.base.jobs import ANY_RUN, Job, clear_finished, remembered, write_file
from headwise.base.options import HealOptions, takes_options
from headwise.base.options.convert import MigrateOptions
from headwise.base.processes import process_count
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.conversion import convert
from headwise.conversion.frontiers.candidate import Candidate, read_target
from headwise.conversion.frontiers.run import kept_model, remove_model
from headwise.conversion.healing import TRAINING, heal
from headwise.conversion.healing.windows import open_windows as open_healing_windows
from headwise.conversion.plan import CONVERSION, make_plan
from headwise.costs.formulas.model import cache_bytes_per_token
from headwise.costs.formulas.target import target_options
from headwise.errors import ArgumentError, CheckpointError
from headwise.measure.evaluation import Evaluation
from headwise.measure.evaluation.beside_source import (
    NOT_EVALUATED,
    bfloat16_bytes,
    refuse_no_evaluation_set,
    served_bytes,
)
from headwise.measure.texts import (
    check_texts,
    named_texts,
    open_windows,
    read_source,
    refuse_inputs_within,
    text_identity,
)
from headwise.measure.texts.circumstances import circumstances
from headwise.models.checkpoints import Checkpoint, check_output, move_into_place, open_checkpoint, run_identity

LADDER = ("mla:0.75", "mla:0.5", "mla:0.375", "mla:0.25", "mla:0.1875", "mla:0.125")
"""The sizes that are tried where a user names none."""

FULL = "mla:1"
"""MLA without a smaller cache, which the source is converted to first."""

EXACT, EXACT_IN_HALF = 1e-3, 1e-2
"""The loss up to which a conversion without a smaller cache counts as exact, in float32 and in half precision."""

MIGRATING = "migrating"
"""The name of the stage, for progress."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One size that was tried.

    Attributes:
        target: the size as a frontier spells it, such as ``mla:0.5``.
        healed: whether it was trained after its conversion.
        cache_bytes_per_token: the bytes a token of its cache, where numbers that are not in codes are bfloat16.
        loss: the fraction by which the perplexity of the evaluation text rose.
        kl: the mean KL(source ‖ result), in nats a token.
        is_allowed: whether the loss is within what is allowed.
    """

    target: str
    healed: bool
    cache_bytes_per_token: float
    loss: float
    kl: float
    is_allowed: bool


@dataclass(frozen=True, kw_only=True)
class Migration:
    """The report of a migration.

    Attributes:
        source: the source, as the user named it.
        output: the folder of the result.
        max_quality_loss: the largest fraction by which the perplexity may rise.
        cache_bytes_per_token: the bytes a token of the source's cache, in bfloat16.
        steps: every size that was tried, in order.
        chosen: the step whose folder is the output; None where no size lost as little as is allowed, and there is no
            output.
        kept: the folder from which a call that allows more or names other sizes goes on; None where there is an
            output.
        made_with: what the numbers depend on besides the model, see `circumstances`.
    """

    source: str
    output: str
    max_quality_loss: float
    cache_bytes_per_token: float
    steps: tuple[Step, ...]
    chosen: Step | None
    kept: str | None
    made_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nearest(self) -> Step:
        """The step with a smaller cache that lost least."""
        return _nearest(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


@takes_options(MigrateOptions)
@checked_types
def migrate(
    source: str | Path, output: str | Path, options: MigrateOptions, *, progress: Progress = silent
) -> Migration:
    """Find the smallest cache whose loss is allowed, and write that model as a folder.

    For example ``migrate("smollm2-135m", "./small", max_quality_loss=0.05, calibrate="a.txt", evaluate="b.txt")``.

    First the source is converted to MLA at its full size, whose perplexity must be the source's. Then sizes are
    tried, the largest first, each converted from the source, and trained where it loses too much and ``heal_tokens``
    is set. There are several kinds of size: MLA, fewer key–value heads, and each of these with a cache in codes; of
    each kind none is tried after one that loses more than is allowed. The result is the smallest that did not. What
    was measured of each is in ``migration.json``. A killed run is continued by the same call.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        options: the keywords below as one object, in place of them.
        progress: the callback that is told of each step.

    Raises:
        ArgumentError: an argument is outside its rule, or there are several processes.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, the output cannot be written, or the first conversion is not
            exact.
    """
    out = Path(output)
    checkpoint, sizes, runs = _check(source, out, options)
    with Job(out, folder=_working_folder(out), run=ANY_RUN) as job:
        report, folder = _Run(str(source), checkpoint, out, job.work, sizes, runs, options, progress).steps()
        job.stays = folder is None
        if folder is not None:
            write_file(folder / MIGRATION, json.dumps(finite(report.to_dict()), indent=1) + "\n")
            job.finish()
            with storage_errors("output", out):
                move_into_place(folder, out, overwrite=options.overwrite)
    return report


def _check(
    source: str | Path, out: Path, options: MigrateOptions
) -> tuple[Checkpoint, tuple[str, ...], dict[bool, str]]:
    """Refuse bad input before any work.

    Returns:
        The source, the sizes to try, and digests of all else that decides the results, of conversions and of healing.
    """
    if process_count() > 1:
        raise ArgumentError("processes", process_count(), "must be one; headwise convert and heal run in several")
    try:
        check_output(out, overwrite=options.overwrite)
    except ArgumentError:
        clear_finished(_working_folder(out))
        raise
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    named = named_texts(options.evaluate)
    calibrated_on = {*map(text_identity, texts.sources)}
    for text in named:
        # One character shows that a text can be read, before hours of conversion.
        read_source(text, characters=1, name="evaluate")
        if text_identity(text, name="evaluate") in calibrated_on:
            raise ArgumentError("evaluate", str(text), "is calibrated on; name another text")
    checkpoint = open_checkpoint(source)
    refuse_inputs_within(out, {"the source": checkpoint.path}, calibrate=texts.sources, evaluate=named)
    refuse_no_evaluation_set(checkpoint.spec)
    sizes = _sizes(checkpoint, options)
    open_windows(checkpoint, texts)
    if options.heal_tokens is not None:
        training = HealOptions(teacher=source, text=options.calibrate, tokens=options.heal_tokens)
        try:
            open_healing_windows(checkpoint, training, checkpoint.spec, name="calibrate")
        except ArgumentError as error:
            raise ArgumentError(error.field, error.value, f"{error.rule}; or leave heal_tokens out") from error
    also = texts.identity() | {"evaluate": [text_identity(text, name="evaluate") for text in named]}
    also |= {"training": TRAINING, "conversion": CONVERSION}
    healed, converted = (one.identity() | also for one in (options, replace(options, heal_tokens=None)))
    return checkpoint, sizes, {True: run_identity(checkpoint, **healed), False: run_identity(checkpoint, **converted)}


def _working_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.headwise-migration")


def _sizes(checkpoint: Checkpoint, options: MigrateOptions) -> tuple[str, ...]:
    """The sizes to try, each once, the largest cache first; sizes that the source cannot have are refused."""
    taken: dict[str, int] = {}
    for target in map(read_target, options.targets or LADDER):
        if Candidate(target).cache is not None:
            raise ArgumentError("target", target, "must be a conversion, whose result is a model folder")
        plan = make_plan(checkpoint, Candidate(target).parsed(), calibration="text")
        taken[target] = cache_bytes_per_token(plan.after) if plan.code_bytes is None else plan.code_bytes
    return tuple(sorted(taken, key=taken.__getitem__, reverse=True))


def _nearest(tried: Sequence[Step]) -> Step:
    """The step that lost least; the first does not count, because its cache is not smaller."""
    return min(tried[1:], key=lambda step: step.loss)


def _evaluation(found: Evaluation | None, target: str, notes: Sequence[str]) -> Evaluation:
    """A report's evaluation; where there is none, its notes say why."""
    if found is None:
        undone = next((note for note in notes if note.startswith(NOT_EVALUATED)), "is missing")
        raise CheckpointError("evaluation", target, undone)
    return found


def _kind(target: str) -> tuple[str, bool]:
    """The kind of a size: within a kind a smaller size loses more; between kinds, one in codes may lose less."""
    parsed = Candidate(target).parsed()
    return ("grouped" if parsed.mechanism in ("mha", "gqa", "mqa") else parsed.mechanism), parsed.is_coded


@dataclass(frozen=True)
class _Run:
    """One migration, in its working folder.

    Attributes:
        source: the source, as the user named it.
        checkpoint: the source, as it was opened.
        out: the folder to write.
        work: the folder of the steps.
        sizes: the sizes to try, in this order.
        runs: the digest of all that decides the results of conversions, and of healing.
        options: the user's options.
        progress: the callback that is told of each step.
    """

    source: str
    checkpoint: Checkpoint
    out: Path
    work: Path
    sizes: tuple[str, ...]
    runs: Mapping[bool, str]
    options: MigrateOptions
    progress: Progress

    def steps(self) -> tuple[Migration, Path | None]:
        """Try the sizes; return the report, and the folder of the chosen one."""
        exact = self._tried(FULL)
        exactly = EXACT if open_checkpoint(self.source).dtype.itemsize >= 4 else EXACT_IN_HALF
        if abs(exact.loss) > exactly:
            self._remove(exact)
            self._file(FULL).unlink()
            rule = f"must be within {exactly:g} where the cache is not smaller"
            raise CheckpointError("loss", f"{exact.loss:.4g}", f"{rule}: the evaluation measures something else")
        tried = [exact]
        chosen: Step | None = None
        ended = set()
        for number, target in enumerate(self.sizes):
            self.progress(MIGRATING, number, len(self.sizes))
            if _kind(target) in ended:
                continue
            step = self._tried(target)
            tried.append(step)
            if not step.is_allowed and self.options.heal_tokens is not None:
                step = self._tried(target, healed=True)
                tried.append(step)
            if not step.is_allowed:
                ended.add(_kind(target))
            elif chosen is None or step.cache_bytes_per_token < chosen.cache_bytes_per_token:
                chosen = step
            keep = chosen or _nearest(tried)
            for one in tried:  # an earlier run may have removed some
                if one is not keep:
                    self._remove(one)
        self.progress(MIGRATING, len(self.sizes), len(self.sizes))
        report = Migration(
            source=self.source,
            output=str(self.out),
            max_quality_loss=self.options.max_quality_loss,
            cache_bytes_per_token=self._known(FULL)["reference"],
            steps=tuple(tried),
            chosen=chosen,
            kept=str(self.work) if chosen is None else None,
            made_with=self._circumstances(),
        )
        if chosen is not None:
            self._make(chosen.target, healed=chosen.healed)  # again, where an earlier run has removed it
        return report, None if chosen is None else self._folder(chosen.target, healed=chosen.healed)

    def _circumstances(self) -> dict[str, Any]:
        checkpoint = open_checkpoint(self.source)
        texts = [*named_texts(self.options.calibrate), *named_texts(self.options.evaluate)]
        return circumstances(checkpoint.path, dtype=checkpoint.dtype, texts=texts, device=self.options.device)

    def _folder(self, target: str, *, healed: bool) -> Path:
        return self.work / (Candidate(target).slug + ("-healed" if healed else ""))

    def _file(self, target: str, *, healed: bool = False) -> Path:
        """The file of what was measured of a size; it stays when the size's folder is removed."""
        folder = self._folder(target, healed=healed)
        return folder.with_name(f"{folder.name}-{self.runs[healed][:12]}.json")

    def _remove(self, step: Step) -> None:
        remove_model(self._folder(step.target, healed=step.healed))

    def _tried(self, target: str, *, healed: bool = False) -> Step:
        """The step of a size, measured by this run or an earlier one."""
        known = self._known(target, healed=healed)
        return Step(
            target=target,
            healed=healed,
            cache_bytes_per_token=known["bytes"],
            loss=known["loss"],
            kl=known["kl"],
            is_allowed=known["loss"] <= self.options.max_quality_loss,
        )

    def _known(self, target: str, *, healed: bool = False) -> dict[str, Any]:
        file, make = self._file(target, healed=healed), partial(self._make, target, healed=healed)
        return remembered(file, ("loss", "kl", "bytes", "reference"), make)

    def _make(self, target: str, *, healed: bool) -> dict[str, Any]:
        """Make the folder of a size where it is missing; return what was measured of it."""
        folder = self._folder(target, healed=healed)

        def make() -> dict[str, Any]:
            evaluation = self._healed(target, folder) if healed else self._converted(target, folder)
            assert evaluation.perplexity_ratio is not None
            self.checkpoint.refuse_changed()  # it would be kept as a result of what the source was
            return {
                "loss": evaluation.perplexity_ratio - 1,
                "kl": evaluation.kl,
                "bytes": served_bytes(open_checkpoint(folder), evaluation),
                "reference": bfloat16_bytes(open_checkpoint(self.source), evaluation.window),
            }

        return kept_model(folder, self.runs[healed], make)

    @property
    def _alike(self) -> dict[str, Any]:
        """The keywords of every conversion and every training."""
        evaluated = {"evaluate": self.options.evaluate, "evaluation_windows": self.options.evaluation_windows}
        return evaluated | {"device": self.options.device, "overwrite": True, "progress": self.progress}

    def _converted(self, target: str, folder: Path) -> Evaluation:
        names = () if target == FULL else ("calibrate", "calibration_tokens", "calibration_window")
        calibrated = {name: getattr(self.options, name) for name in names}
        report = convert(self.source, folder, **target_options(target), **calibrated, **self._alike)
        return _evaluation(report.evaluation, target, report.notes)

    def _healed(self, target: str, folder: Path) -> Evaluation:
        self._make(target, healed=False)
        trained = {"teacher": self.source, "text": self.options.calibrate, "tokens": self.options.heal_tokens}
        report = heal(self._folder(target, healed=False), folder, **trained, **self._alike)
        return _evaluation(report.after, target, report.notes)
