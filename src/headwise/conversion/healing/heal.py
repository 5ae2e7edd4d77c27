"""`heal`: train a converted model until it behaves like the model it was converted from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from headwise.base.documents import HEALING, finite
from headwise.base.jobs import Job
from headwise.base.options import takes_options
from headwise.base.options.heal import HealOptions
from headwise.base.processes import entered_first, on_main_process, process_count
from headwise.base.progress import Progress, silent
from headwise.base.type_checks import checked_types
from headwise.conversion.calibration.windows import CalibrationWindows
from headwise.conversion.healing.loop import Loop, learning_rate, run_model
from headwise.conversion.healing.objective import StoredTeacher, bytes_per_token
from headwise.conversion.healing.optimizer import Progressed, TrainingState, gathered_tensor, optimizer_of, shard
from headwise.conversion.healing.report import CONVERSION, Healing, healed_card
from headwise.conversion.healing.trained import (
    NOTHING_TO_TRAIN,
    check_file_cache,
    refuse_unwritten,
    round_in_training,
    select,
    trained_format,
    trained_numbers,
    trained_tensors,
)
from headwise.conversion.healing.windows import HealingWindows, open_windows
from headwise.conversion.solvers.device import is_quick, own_device
from headwise.errors import ArgumentError, naming
from headwise.measure.evaluation import Evaluation
from headwise.measure.evaluation.beside_source import EvaluationSet, choose_evaluation_set, evaluate_result
from headwise.measure.texts import CalibrationTexts, named_texts, refuse_inputs_within, text_identity
from headwise.measure.texts.circumstances import circumstances
from headwise.measure.timing import peak_rss_bytes
from headwise.models.checkpoints import (
    Checkpoint,
    FolderWriter,
    GgufCheckpoint,
    check_output,
    dtype_name,
    model_identity,
    refuse_other_tokens,
    run_identity,
)
from headwise.models.checkpoints.gguf_in_place import check_file, copied_files
from headwise.runtime.hf import as_dtype, load, open_decoder
from headwise.runtime.kernels.native import built
from headwise.runtime.quantization.formats import EngineFormat
from headwise.runtime.quantization.transform_code import FILE as CODES

TRAINING = 7
"""The number of the way of training, which rises when equal options come to train otherwise."""

NOTHING_GAINED = (
    "no step lowered the held-out loss, so the result is the model it was given: train on more tokens, or at a lower "
    "learning rate"
)
"""The note of a run that changed nothing."""


@takes_options(HealOptions)
@checked_types
@torch.inference_mode(False)
def heal(model: str | Path, output: str | Path, options: HealOptions, *, progress: Progress = silent) -> Healing:
    """Train a converted or prepared model on text until it behaves like its source, and write the result.

    For example ``heal("./half", "./healed", teacher="smollm2-135m", text="text.txt", tokens=200_000)``.

    The result has the given model's format, sizes and codes; only values of its tensors differ. A cache in codes is
    rounded while the model is trained, and with ``cache`` one as an engine has it. A killed run is continued by the
    same call, and computes what an uninterrupted one would have.

    Args:
        model: a converted folder, or any model folder or ``.gguf`` with the teacher's vocabulary. Of a ``.gguf`` what
            is in blocks of codes stays as it is, byte for byte.
        output: the folder to write, which must not exist, or be empty, unless ``overwrite``; a ``.gguf`` for a
            ``.gguf``.
        options: the keywords below as one object, in place of them.
        progress: the callback that is told of each step.

    Raises:
        ArgumentError: an argument is outside its rule, or the vocabularies differ.
        SpecError: a model is no text decoder.
        CheckpointError: a model cannot be read, the output cannot be written, or the loss stays not finite.
    """
    prepared = _prepare(model, Path(output), options)
    checkpoint = prepared.checkpoint
    if isinstance(checkpoint, GgufCheckpoint):
        return _heal_file(checkpoint, prepared, progress)
    work_bytes = _work_bytes(prepared)
    writer = FolderWriter(
        prepared.output, checkpoint.tensors, run=prepared.run, overwrite=options.overwrite, work_bytes=work_bytes
    )
    with entered_first(writer):
        before = _evaluate(checkpoint.path, prepared, progress)
        trained, done, count = _train(prepared, writer.work, progress)
        _write(prepared, trained, writer)
        del trained  # the evaluation loads it again, as users will
        after = _evaluate(writer.folder, prepared, progress)
        report = _report(prepared, done, count, before, after)
        writer.write_text("README.md", healed_card(checkpoint.path, checkpoint.config, report))
        writer.write_text(HEALING, json.dumps(finite(report.to_dict()), indent=1) + "\n")
    return replace(report, notes=(*report.notes, *writer.notes))


def _heal_file(checkpoint: GgufCheckpoint, prepared: _Prepared, progress: Progress) -> Healing:
    """`heal` a ``.gguf``."""
    with entered_first(Job(prepared.output, run=prepared.run)) as job:
        before = _evaluate(checkpoint.path, prepared, progress)
        trained, done, count = _train(prepared, job.work, progress)
        tensors = {name: gathered_tensor(made()).cpu() for name, made in trained_tensors(trained, checkpoint).items()}
        del trained  # the evaluation loads it again, as users will

        def write() -> Evaluation | str | None:
            check_file(checkpoint.files, prepared.output, overwrite=prepared.options.overwrite)  # it took a while
            with copied_files(checkpoint.files, prepared.output) as copies:
                checkpoint.write(tensors, copies)
                measured = _evaluated(copies[checkpoint.path], prepared, progress)
                job.finish()
                return measured

        after = on_main_process(write)
    return _report(prepared, done, count, before, after)


@dataclass(frozen=True)
class _Prepared:
    """A healing whose inputs have been checked.

    Attributes:
        model: the converted model, as the user named it.
        output: the folder to write.
        options: the user's options.
        checkpoint: the checkpoint of the converted model.
        teacher: the checkpoint of the teacher.
        windows: the windows to train on.
        evaluation_set: the windows to evaluate on; may be empty.
        device: the device of this process.
        dtype: the dtype that matrix products are computed in.
        code: the engine's format that keys and values are rounded to; None where they are not.
    """

    model: str
    output: Path
    options: HealOptions
    checkpoint: Checkpoint
    teacher: Checkpoint
    windows: HealingWindows
    evaluation_set: EvaluationSet
    device: torch.device
    dtype: torch.dtype
    code: EngineFormat | None

    @property
    def run(self) -> str:
        """A digest of all that decides the output."""
        texts = [text_identity(text, name="text") for text in named_texts(self.options.text)]
        decides = self.options.identity() | {
            "teacher": model_identity(self.teacher),
            "text": texts,
            "dtype": dtype_name(self.dtype),
            "training": TRAINING,
        }
        return run_identity(self.checkpoint, **decides)


def _prepare(model: str | Path, output: Path, options: HealOptions) -> _Prepared:
    """Check all inputs before any work."""
    device = own_device(options.device)
    if options.batch % process_count():
        raise ArgumentError("batch", options.batch, f"must be a multiple of {process_count()}, the processes")
    with naming(source="model"):
        checkpoint = open_decoder(model)
    with naming(source="teacher"):
        teacher = open_decoder(options.teacher)
    if isinstance(checkpoint, GgufCheckpoint):
        check_file(checkpoint.files, output, overwrite=options.overwrite)
        check_file_cache(options.cache)
        if options.train == "lora":
            rule = "must be another for a .gguf: its matrices are in blocks of codes, to which no change can be added"
            raise ArgumentError("train", options.train, rule)
    elif checkpoint.path.is_dir():
        check_output(output, overwrite=options.overwrite)
    else:
        rule = "must be a model folder or a .gguf: the result is written in its format"
        raise ArgumentError("model", str(model), rule)
    sizes = [one.spec.vocab_size for one in (checkpoint, teacher)]
    if sizes[0] != sizes[1]:
        raise ArgumentError(
            "teacher", str(options.teacher), f"has a vocabulary of {sizes[1]}, the model of {sizes[0]}"
        )
    inputs = {"the model": checkpoint.path, "the teacher": teacher.path}
    texts, named = named_texts(options.text), named_texts(options.evaluate)
    refuse_inputs_within(output, inputs, text=texts, evaluate=named)
    if options.hidden > 0:
        _refuse_other_shape(checkpoint, teacher)
    if options.teacher_top is not None and sizes[0] is not None and options.teacher_top > sizes[0]:
        raise ArgumentError("teacher_top", options.teacher_top, f"must be at most {sizes[0]}, the vocabulary")
    if options.train == "new" and not trained_numbers(checkpoint, teacher, options):
        raise ArgumentError("train", options.train, NOTHING_TO_TRAIN)
    code = None if options.cache is None else trained_format(checkpoint, options.cache)
    windows = open_windows(checkpoint, options, teacher.spec)
    refuse_other_tokens(checkpoint.path, teacher.path, name="teacher", source=str(teacher.path))
    evaluation_set: EvaluationSet = []
    if options.evaluate is not False:
        # Where no text is named, the windows are chosen behind the part of the texts that training reads.
        trained_on = CalibrationTexts(tuple(texts), tokens=windows.read_tokens, window=windows.width)
        evaluation_set = choose_evaluation_set(
            teacher, named, calibrate=trained_on, windows=options.evaluation_windows
        )
    dtype = as_dtype(options.dtype or ("bfloat16" if is_quick(device) else "float32"))
    return _Prepared(str(model), output, options, checkpoint, teacher, windows, evaluation_set, device, dtype, code)


def _work_bytes(prepared: _Prepared) -> int:
    """The bytes that a run keeps on disk while it works."""
    options, windows = prepared.options, prepared.windows
    # Float32 parameters and at most two moments each, in two saves and one that is being written; the best ones.
    saved = (3 * 3 + 2) * 4 * trained_numbers(prepared.checkpoint, prepared.teacher, options)
    read = min(windows.steps * windows.batch, len(windows.train)) + len(windows.held_out)
    stored = read * windows.width * bytes_per_token(options.teacher_top) if options.teacher_top else 0
    return saved + stored


def _refuse_other_shape(checkpoint: Checkpoint, teacher: Checkpoint) -> None:
    """Refuse a teacher whose layers' outputs are not those of the model's layers."""
    one, two = checkpoint.spec, teacher.spec
    sizes = (one.layers[0].hidden_size, two.layers[0].hidden_size), (one.num_layers, two.num_layers)
    for field, (own, other) in zip(("hidden_size", "num_layers"), sizes, strict=True):
        if own != other:
            raise ArgumentError(
                "hidden", field, f"is {other} in the teacher and {own} in the model; leave hidden out"
            )


def _evaluate(folder: Path, prepared: _Prepared, progress: Progress) -> Evaluation | str | None:
    """A model beside the teacher; a note where that cannot be done, and None in all processes but the first."""
    return on_main_process(partial(_evaluated, folder, prepared, progress))


def _evaluated(folder: Path, prepared: _Prepared, progress: Progress) -> Evaluation | str | None:
    if not prepared.evaluation_set:
        return None
    options, device = prepared.options, str(prepared.device)
    return evaluate_result(
        folder, options.teacher, prepared.evaluation_set, progress, cache=options.cache, device=device
    )


def _train(prepared: _Prepared, folder: Path, progress: Progress) -> tuple[Any, Progressed, int]:
    """Train the model; its parameters, what was done and how many parameters were trained."""
    options = prepared.options
    needs_teacher = options.objective == "distill" or options.hidden > 0
    # The teacher comes before the model: where its tokens are kept on disk, it leaves memory again.
    teacher = _teacher(prepared, folder, progress) if needs_teacher else None
    model = load(prepared.checkpoint.path, dtype=torch.float32, device=str(prepared.device))
    if prepared.code is not None:
        round_in_training(model, prepared.checkpoint, prepared.code)
    if options.checkpointing:
        _compute_layers_twice(model)
    select(model, prepared.checkpoint, options.train, prepared.teacher, rank=options.lora_rank)
    refuse_unwritten(model, prepared.checkpoint)
    shard(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = optimizer_of(model, parameters, options.optimizer, dtype=prepared.dtype)
    if prepared.device.type == "cpu":
        built()  # here, where Ctrl-C ends a compiler; windows are worked on in other threads
    loop = Loop(model, teacher, parameters, prepared.windows, options, prepared.dtype)
    done = loop.run(TrainingState(folder, parameters, optimizer), optimizer, progress)
    return model, done, sum(parameter.numel() for parameter in parameters.values())


def _compute_layers_twice(model: Any) -> None:
    """Compute each layer again in the backward pass."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():  # in training mode alone, and what is in them stays without dropout
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            if isinstance(getattr(module, "dropout", None), float):  # OPT's layers call it themselves
                module.dropout = 0.0


def _teacher(prepared: _Prepared, folder: Path, progress: Progress) -> Any | StoredTeacher:
    """The teacher, or what is kept of it on disk."""

    @cache
    def model() -> Any:
        return load(prepared.teacher.path, dtype=prepared.dtype, device=str(prepared.device))

    if prepared.options.teacher_top is None:
        return model()
    stored, windows = StoredTeacher(folder / "teacher", prepared.options.teacher_top), prepared.windows

    @torch.no_grad()
    def logits(window: CalibrationWindows) -> torch.Tensor:  # only of windows that are not stored yet
        result: torch.Tensor = run_model(model(), window, prepared.dtype).logits[0]
        return result

    total = windows.steps * windows.batch + len(windows.held_out)
    on_main_process(partial(stored.store, logits, windows.read_in_order(), total, progress))
    return stored


def _write(prepared: _Prepared, model: Any, writer: FolderWriter) -> None:
    """Write the folder with the trained tensors, but for its card and what was measured."""
    checkpoint = prepared.checkpoint
    writer.add_companions(checkpoint)
    writer.write_json("config.json", checkpoint.config)
    card = CONVERSION if (checkpoint.path / CONVERSION).is_file() else "README.md"  # of a model healed before
    for name, new in ((CODES, CODES), (card, CONVERSION)):
        if (checkpoint.path / name).is_file():
            writer.write_bytes(new, (checkpoint.path / name).read_bytes())
    trained = trained_tensors(model, checkpoint)
    for name in checkpoint.tensors:
        tensor = gathered_tensor(trained[name]()) if name in trained else None  # by all processes
        if not writer.has(name):
            tensor = checkpoint.read(name) if tensor is None else tensor
            writer.add(name, tensor.cpu().to(checkpoint.tensors[name].dtype))


def _report(
    prepared: _Prepared, done: Progressed, count: int, before: Evaluation | str | None, after: Evaluation | str | None
) -> Healing:
    options, windows = prepared.options, prepared.windows
    notes = [*prepared.checkpoint.notes, *(one for one in (before, after) if isinstance(one, str))]
    if done.best_step == 0:
        notes.append(NOTHING_GAINED)
    return Healing(
        model=prepared.model,
        output=str(prepared.output),
        teacher=str(options.teacher),
        objective=options.objective,
        objective_settings=options.objective_settings,
        texts=tuple(map(str, named_texts(options.text))),
        trained=options.train,
        trained_parameters=count,
        optimizer=options.optimizer,
        learning_rate=learning_rate(options, done.held_out[0][1]),
        cache=options.cache,
        steps=done.step,
        planned_steps=windows.steps,
        tokens=done.step * windows.batch * windows.width,
        window=windows.width,
        batch=windows.batch,
        losses=tuple(done.losses),
        held_out=tuple(done.held_out),
        best_step=done.best_step,
        stopped=done.stopped,
        rollbacks=done.rollbacks,
        seconds=done.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        before=None if isinstance(before, str | None) else replace(before, model=prepared.model),
        after=None if isinstance(after, str | None) else replace(after, model=str(prepared.output)),
        made_with=circumstances(
            prepared.checkpoint.path,
            dtype=prepared.dtype,
            texts=[*named_texts(options.text), *(name for name, _ in prepared.evaluation_set)],
            seed=options.seed,
            device=prepared.device,
        ),
        notes=tuple(dict.fromkeys(notes)),
    )
