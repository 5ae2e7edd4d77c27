"""`migrate`: verify that nothing is lost where nothing need be, then make the cache smaller while the loss allows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checkpoints import check_output, open_checkpoint, run_identity
from headwise.conversion import convert
from headwise.conversion.closing_evaluation import refuse_unexamined
from headwise.cost.target import target_options
from headwise.disk import lock_folder, refuse_input_within, remove_locked, unlock, write_whole
from headwise.documents import as_document, finite
from headwise.errors import ArgumentError, CheckpointError
from headwise.evaluation import Evaluation
from headwise.frontiers.candidate import Candidate, read_target
from headwise.healing import heal
from headwise.options import takes_options
from headwise.options.migrate import MigrateOptions
from headwise.progress import Progress, silent
from headwise.texts import check_texts, named_texts, read_source, refuse_texts_within, text_identity
from headwise.type_checks import typed

LADDER = ("mla:0.75", "mla:0.5", "mla:0.375", "mla:0.25", "mla:0.1875", "mla:0.125")
"""The sizes that are tried where a user names none."""

FILE = "migration.json"
"""The file of a migrated folder that holds its `Migration`."""

EXACT = 1e-3
"""The loss up to which a conversion without a smaller cache counts as exact: rounding in the model's dtype."""

MIGRATING = "migrating"
"""The name of the stage, for progress."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One size that was tried.

    Attributes:
        target: as a frontier spells it.
        healed: whether it was trained after its conversion.
        cache_bytes_per_token: of its cache.
        loss: by which fraction the perplexity of the evaluation text rose.
        kl: in nats a token.
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
        max_quality_loss: what is allowed.
        cache_bytes_per_token: of the source's cache.
        steps: every size that was tried, in order.
        chosen: the step whose folder is the output; None where no size lost as little as is allowed, and there is no
            output.
    """

    source: str
    output: str
    max_quality_loss: float
    cache_bytes_per_token: float
    steps: tuple[Step, ...]
    chosen: Step | None

    @property
    def nearest(self) -> Step:
        """The step that lost least."""
        return min(self.steps, key=lambda step: step.loss)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return as_document(self)


@takes_options(MigrateOptions)
@typed
def migrate(
    source: str | Path, output: str | Path, options: MigrateOptions, *, progress: Progress = silent
) -> Migration:
    """Find the smallest cache whose loss is allowed, and write that model as a folder.

    For example ``migrate("smollm2-135m", "./small", max_quality_loss=0.05, calibrate="a.txt", evaluate="b.txt")``.

    First a conversion to MLA without a smaller cache shows that nothing but the size costs quality. Then sizes are
    tried from the largest to the smallest, each converted from the source, and trained where it loses too much and
    ``heal_tokens`` is set, until one loses more than is allowed. What was measured of each is in ``migration.json``.
    A killed run is continued by the same call.

    Args:
        source: a model folder, ``.gguf``, ``smollm2-135m`` or ``hf://owner/name``; a decoder.
        output: the folder to write; must not exist, or be empty, unless ``overwrite``.
        options: the keywords below as one object, in place of them.
        progress: told of each step.

    Raises:
        ArgumentError: an argument is outside its rule.
        SpecError: the source's attention is of a kind that is not converted.
        CheckpointError: the source cannot be read, the output cannot be written, or the first conversion is not
            exact.
    """
    out = Path(output)
    run = _check(source, out, options)
    work = out.with_name(f".{out.name}.headwise-migration")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(work)
    except BlockingIOError as error:
        raise ArgumentError("output", str(out), str(error.strerror)) from None
    try:
        report, folder = _Run(str(source), out, work, run, options, progress).steps()
        if folder is not None:
            (folder / FILE).write_text(json.dumps(finite(report.to_dict()), indent=1) + "\n", encoding="utf-8")
            if out.exists():
                shutil.rmtree(out)
            os.replace(folder, out)
    except BaseException:
        if any(work.glob("*.json")):  # something is measured, which the next run need not do again
            unlock(lock)
        else:
            remove_locked(work, lock)
        raise
    remove_locked(work, lock)
    return report


def _check(source: str | Path, out: Path, options: MigrateOptions) -> str:
    """Refuse bad input before any work; a digest of all that decides the results."""
    check_output(out, overwrite=options.overwrite)
    for target in options.targets:
        if Candidate(read_target(target)).cache is not None:
            raise ArgumentError("target", target, "must be a conversion, whose result is a model folder")
    texts = check_texts(options.calibrate, options.calibration_tokens, options.calibration_window)
    named = named_texts(options.evaluate)
    refuse_texts_within(out, texts.sources, name="calibrate")
    refuse_texts_within(out, named, name="evaluate")
    calibrated_on = {*map(text_identity, texts.sources)}
    for text in named:
        read_source(text, characters=1, name="evaluate")
        if text_identity(text, name="evaluate") in calibrated_on:
            raise ArgumentError("evaluate", str(text), "is calibrated on; name another text")
    checkpoint = open_checkpoint(source)
    refuse_input_within(out, checkpoint.path, "the source")
    refuse_unexamined(checkpoint.spec)
    evaluate = [text_identity(text, name="evaluate") for text in named]
    return run_identity(checkpoint, **options.identity() | texts.identity() | {"evaluate": evaluate})


@dataclass(frozen=True)
class _Run:
    """One migration, in its working folder.

    Attributes:
        source: the source, as the user named it.
        out: the folder to write.
        work: the folder of the steps.
        run: the digest of all that decides their results.
        options: the user's options.
        progress: told of each step.
    """

    source: str
    out: Path
    work: Path
    run: str
    options: MigrateOptions
    progress: Progress

    def steps(self) -> tuple[Migration, Path | None]:
        """Try the sizes; the report, and the folder of the chosen one."""
        targets: Sequence[str] = tuple(map(read_target, self.options.targets)) or LADDER
        allowed = self.options.max_quality_loss
        exact, reference = self._converted("mla:1")
        if exact.loss > EXACT:
            rule = f"must be at most {EXACT:g} where the cache is not smaller; the evaluation text or dtype is unfit"
            raise CheckpointError("loss", f"{exact.loss:.4g}", rule)
        tried, chosen, folder = [exact], None, None
        for number, target in enumerate(targets):
            self.progress(MIGRATING, number, len(targets))
            step, _ = self._converted(target)
            tried.append(step)
            if not step.is_allowed and self.options.heal_tokens is not None:
                step, _ = self._healed(target)
                tried.append(step)
            if not step.is_allowed:
                break
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # an earlier run may have
            chosen, folder = step, self._folder(step)
        self.progress(MIGRATING, len(targets), len(targets))
        report = Migration(
            source=self.source,
            output=str(self.out),
            max_quality_loss=allowed,
            cache_bytes_per_token=reference,
            steps=tuple(tried),
            chosen=chosen,
        )
        return report, folder

    def _folder(self, step: Step) -> Path:
        return self.work / (Candidate(step.target).slug + ("-healed" if step.healed else ""))

    def _converted(self, target: str) -> tuple[Step, float]:
        """Convert to a size, or take what an earlier run measured of it; the source's cache bytes too."""
        folder = self.work / Candidate(target).slug

        def make() -> Evaluation:
            options = self.options
            lossy = {"calibrate": options.calibrate, "calibration_tokens": options.calibration_tokens}
            lossy |= {"calibration_window": options.calibration_window}
            report = convert(
                self.source,
                folder,
                **target_options(target),
                **({} if target == "mla:1" else lossy),
                device=options.device,
                evaluate=options.evaluate,
                evaluation_windows=options.evaluation_windows,
                overwrite=True,
                progress=self.progress,
            )
            if report.evaluation is None:
                raise CheckpointError("evaluation", target, report.notes[-1])
            return report.evaluation

        return self._measured(target, folder, make)

    def _healed(self, target: str) -> tuple[Step, float]:
        """Train a converted size; likewise."""
        converted = self.work / Candidate(target).slug
        folder = self.work / f"{converted.name}-healed"

        def make() -> Evaluation:
            options = self.options
            report = heal(
                converted,
                folder,
                teacher=self.source,
                text=options.calibrate,
                tokens=options.heal_tokens,
                device=options.device,
                evaluate=options.evaluate,
                evaluation_windows=options.evaluation_windows,
                overwrite=True,
                progress=self.progress,
            )
            if report.after is None:
                raise CheckpointError("evaluation", target, report.notes[-1])
            return report.after

        return self._measured(target, folder, make, healed=True)

    def _measured(
        self, target: str, folder: Path, make: Callable[[], Evaluation], *, healed: bool = False
    ) -> tuple[Step, float]:
        """A step that is made and measured, unless an earlier run has; and the bytes of the source's cache."""
        kept = folder.with_name(f"{folder.name}.json")
        known = _read(kept, self.run)
        if known is None:
            evaluation = make()
            assert evaluation.perplexity_ratio is not None
            assert evaluation.kl is not None
            assert evaluation.reference is not None
            known = {
                "run": self.run,
                "loss": evaluation.perplexity_ratio - 1,
                "kl": evaluation.kl,
                "bytes": evaluation.cache_bytes_per_token,
                "reference": evaluation.reference.cache_bytes_per_token,
            }
            write_whole(kept, json.dumps(known).encode())
        step = Step(
            target=target,
            healed=healed,
            cache_bytes_per_token=known["bytes"],
            loss=known["loss"],
            kl=known["kl"],
            is_allowed=known["loss"] <= self.options.max_quality_loss,
        )
        return step, float(known["reference"])


def _read(file: Path, run: str) -> dict[str, Any] | None:
    """What an earlier run of the same identity measured."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return known if known["run"] == run else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
