"""What a prepared model is worth: its products beside the source's, and what each loses in small caches.

The products of queries and keys, and the values, of every layer are compared before the result is in its place. No
model is run for that: a layer's weights are read from the disk, of both models, one layer after the other, and given
the same random inputs. It takes seconds, so that nothing wrong is ever left. What a text tells takes minutes, and is
measured once the result is written: no error or interruption of it costs that.

Shapes: S or T tokens, H query heads, K key–value heads, D head dim, G groups of channels (see `channels`), E hidden
size, V vocabulary.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.base.options import PrepareOptions
from headwise.base.progress import Progress
from headwise.conversion.preparation.change import Change, changed, channels, num_pairs
from headwise.conversion.preparation.samples import projected
from headwise.conversion.solvers.layer import grouped_spec
from headwise.costs.prediction import RUNNABLE
from headwise.errors import ArgumentError, CheckpointError, StorageError
from headwise.measure.evaluation import Evaluation, Pair, evaluate_windows, open_pair
from headwise.measure.evaluation.beside_source import EvaluationSet, short_of_memory
from headwise.measure.evaluation.scoring import kl_divergence
from headwise.models.checkpoints import Checkpoint, GgufCheckpoint, dtype_name, open_checkpoint
from headwise.models.specs import GroupedSpec
from headwise.runtime.hf import check_logits
from headwise.runtime.quantization.formats import EngineFormat
from headwise.serving.engines.in_engine import evaluate_windows_in_engine, is_installed
from headwise.serving.exports.gguf import export_gguf

RANDOM_INPUTS = 16
"""The number of random inputs that a layer is given."""

APART = 7
"""The number of positions from one input to the next: neighbours alone would not see slow pairs turn."""

ROUNDING = 2.0**-8
"""The largest error of products, in parts of their size. Powers of two are exact but where float16 is too small for a
scale, or 16 bits hold a shifted bias; a row in a wrong place, or a factor, is off by about as much as its size."""

_TINY = 1e-300


def check_written(
    source: Checkpoint, written: Checkpoint, changes: Sequence[Change], output: object, progress: Progress
) -> float:
    """Compare the attention of every written layer with that of the source, in float64.

    Each rotary pair's part of a product has to be the source's at all positions, so that a wrong row shows however
    small it is beside others of its head.

    Args:
        source: the source model.
        written: the model that was written, opened anew.
        changes: the change of each layer; biases that it shifts are shifted in the source first.
        output: the path by which the user knows the written model.
        progress: the callback that is told of each layer.

    Returns:
        The largest ratio, over all layers and heads, of the root mean square of a difference to that of the source's
        numbers; for products, to the lengths of the pairs of queries and keys, which may be nearly at right angles.

    Raises:
        CheckpointError: the ratio is beyond rounding.
    """
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for index, change in enumerate(changes):
        progress("checking", index, len(changes))
        layer = grouped_spec(source.spec.layers[index])
        before, after = (each.family.read_attention(each.read, index, layer) for each in (source, written))
        if change.shift is not None:  # in float64: what was written may have more digits than the source's biases
            before["k_proj.bias"] = before["k_proj.bias"].double()
            before = changed(before, replace(Change.none(layer), shift=change.shift), layer)
        inputs = torch.randn(1, RANDOM_INPUTS, layer.hidden_size, generator=generator, dtype=torch.float64)
        old, new = (_Parts.of(each, layer, inputs) for each in (before, after))
        for name, size in old.sizes.items():
            off = (new.parts[name] - old.parts[name]).square().mean(1).sqrt()
            largest = max(largest, float((off / size.clamp_min(_TINY)).max()))
        if not largest <= ROUNDING:
            rule = f"computes something else than its source in layer {index}: products are off by {largest:.2g} of"
            raise CheckpointError("output", str(output), f"{rule} their size; nothing is left of it")
    progress("checking", len(changes), len(changes))
    return largest


@dataclass(frozen=True, eq=False)
class _Parts:
    """The products and values that a layer's attention computes from some inputs.

    Attributes:
        parts: the part of each group in the products of queries and keys, ``[H, T · T, G]``, and the values ``[K, T,
            V]``, by ``products`` and ``values``.
        sizes: the sizes of both, root mean squares over tokens, ``[H, G]`` and ``[K, V]``, by the same names.
    """

    parts: dict[str, Tensor]
    sizes: dict[str, Tensor]

    @classmethod
    def of(cls, state: Mapping[str, Tensor], layer: GroupedSpec, inputs: Tensor) -> _Parts:
        states = projected(state, layer, inputs, APART * torch.arange(RANDOM_INPUTS))
        queries, keys = (states.rotated(side, states.positions)[:, 0] for side in "qk")
        keys, values = keys.repeat_interleave(len(queries) // len(keys), 0), states.values[:, 0]
        first, second = channels(layer).T
        pairs = num_pairs(layer)

        def by_group(numbers: Tensor) -> Tensor:
            groups = numbers[..., first]
            groups[..., :pairs] += numbers[..., second[:pairs]]
            return groups

        squares = [by_group(side.square()).mean(1) for side in (queries, keys)]
        return cls(
            {"products": by_group((queries[:, :, None] * keys[:, None]).flatten(1, 2)), "values": values},
            {"products": (squares[0] * squares[1]).sqrt(), "values": values.square().mean(1).sqrt()},
        )


PROOF_TOKENS = 256
"""The number of tokens of a text that log-probabilities are compared on; what is measured on fewer is said to tell
little."""

SAME = 1e-3
"""Mean KL in float32, in nats a token, beyond which a model that should be its source is none. Rounding alone makes
1e-9, and 1e-5 where float16 scales are rounded."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of a prepared model's log-probabilities from its source's, both with a full cache.

    Attributes:
        dtype: the dtype that both were run in.
        tokens: the number of tokens of the text.
        largest: the largest difference of a token's log-probability, over all of the vocabulary, in nats.
        kl: the mean KL(source ‖ prepared), in nats a token.
    """

    dtype: str
    tokens: int
    largest: float
    kl: float


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a model with a small cache, beside the source with a full one.

    Attributes:
        perplexity: the model's perplexity on the text.
        perplexity_ratio: the ratio of the perplexity to that of the source with a full cache.
        kl: the mean KL(source with a full cache ‖ model), in nats a token.
        kl_999: the 99.9 % quantile of this KL, which the few tokens that lose most decide.
        top1_agreement: the fraction of positions where both rank the same token first.
        top1_changed: the number of positions where they do not.
    """

    perplexity: float
    perplexity_ratio: float
    kl: float
    kl_999: float
    top1_agreement: float
    top1_changed: int


@dataclass(frozen=True, kw_only=True)
class CacheLoss:
    """The loss that a small cache causes in a model as it is, and prepared.

    Attributes:
        cache: the format.
        engine: the engine that ran both, with its version; None where the format was simulated.
        before: the loss of the source.
        after: the loss of the prepared model.
    """

    cache: str
    engine: str | None
    before: Loss
    after: Loss


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Measurements of a prepared model after it was written.

    Attributes:
        products: the largest error of products of queries and keys in any layer of what was written, over their size;
            beside those of the source with its biases shifted, where ``refit`` shifts them.
        text: the texts that the rest was measured on, joined by commas; None where none was named.
        window: the number of tokens in each window of these texts; None without a text.
        tokens: the number of predictions that caches were scored on; None without a text.
        differences: the differences of log-probabilities on the beginning of the text: in float32, and in the dtype
            of the weights where that is another.
        caches: the loss that each format causes, simulated; and in its engine, where that is installed.
        notes: notes on what was not measured, or on too little text, and why.
    """

    products: float
    text: str | None = None
    window: int | None = None
    tokens: int | None = None
    differences: tuple[Difference, ...] = ()
    caches: tuple[CacheLoss, ...] = ()
    notes: tuple[str, ...] = ()


def check_engines(formats: Sequence[EngineFormat], python: str | Path | None, *, is_measured: bool) -> None:
    """Refuse an engine's interpreter that the user names where it would not be used.

    Args:
        formats: the formats that the model is prepared for.
        python: the interpreter of an engine's environment; None where none is named.
        is_measured: whether there is a text.

    Raises:
        ArgumentError: no text is measured on, no engine of the formats is run, or none is installed there.
    """
    if python is None:
        return
    if not is_measured:
        raise ArgumentError("engine_python", str(python), "needs --evaluate TEXT: engines are measured on a text")
    engines = {code.engine: RUNNABLE[code.engine] for code in formats if code.engine in RUNNABLE}
    if not engines:
        names = " or ".join(dict.fromkeys(code.engine for code in formats))
        raise ArgumentError("engine_python", str(python), f"is for {' or '.join(RUNNABLE)}, not {names}")
    if not any(is_installed(engine.module, str(python)) for engine in engines.values()):
        install = " or ".join(f"{python} -m pip install '{engine.install}'" for engine in engines.values())
        names = " or ".join(engine.title for engine in engines.values())
        raise ArgumentError("engine_python", str(python), f"has no {names}: {install}")


def prove(
    source: str | Path,
    output: Path,
    products: float,
    evaluation_set: EvaluationSet,
    formats: Sequence[EngineFormat],
    options: PrepareOptions,
    progress: Progress,
) -> Proof:
    """Measure a prepared model beside its source.

    Args:
        source: the source model, as the user named it.
        output: the path of the prepared model.
        products: the ratio that `check_written` returned.
        evaluation_set: the windows of text to measure on; nothing is measured without any.
        formats: the formats that the model was prepared for.
        options: the options of `prepare`: which interpreter has an engine, and whether the prepared model should
            compute what its source does.
        progress: the callback that is told of each window.

    Raises:
        CheckpointError: the prepared model should compute what its source does, and does not.
    """
    if not evaluation_set:
        return Proof(products=products)
    tokens = sum(len(batch) * (batch.shape[1] - 1) for _, batch in evaluation_set)
    differences: list[Difference] = []
    caches: list[CacheLoss] = []
    notes: list[str] = []
    if tokens < PROOF_TOKENS:
        notes.append(f"measured on {tokens:,} tokens alone, too few to tell what is lost: name a longer text")
    ids = evaluation_set[0][1][0][:PROOF_TOKENS]
    pair: Pair | None = None
    with _noting(notes, output):
        pair = _opened(source, output, None, progress)
        if pair.dtype != torch.float32:
            differences.append(_difference(_opened(source, output, "float32", progress), ids))
        differences.append(_difference(pair, ids))
    if not options.refit and any(one.dtype == "float32" and one.kl > SAME for one in differences):
        rule = f"computes something else than its source: KL {differences[0].kl:.2g} on {evaluation_set[0][0]}"
        raise CheckpointError("output", str(output), f"{rule}; nothing is left of it")
    if pair is not None and differences:
        with _noting(notes, output):
            caches += _simulated(pair, evaluation_set, formats, progress)
    pair = None  # engines load models of their own
    for code in formats:
        with _noting(notes, output, f" in {code.engine} itself"):
            caches += _in_its_engine(source, output, evaluation_set, code, options.engine_python, notes, progress)
    return Proof(
        products=products,
        text=", ".join(name for name, _ in evaluation_set),
        window=evaluation_set[0][1].shape[1],
        tokens=tokens,
        differences=tuple(differences),
        caches=tuple(caches),
        notes=tuple(dict.fromkeys(notes)),
    )


@contextmanager
def _noting(notes: list[str], output: Path, where: str = "") -> Iterator[None]:
    """Turn an error of the block into a note: no error is to cost the user what is written."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"{output} is written and was checked; only what it loses was not measured to the end")
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        notes.append(f"{NOT_MEASURED}{where}: {kind}{' '.join(str(error).split())}")


def _opened(source: str | Path, output: Path, dtype: str | None, progress: Progress) -> Pair:
    """Open both models as a pair, of which weights are read at their first use.

    Raises:
        StorageError: too little memory is free for them.
    """
    pair = open_pair(output, against=source, dtype=dtype, progress=progress)
    if (short := short_of_memory(pair)) is not None:
        raise StorageError("memory", dtype_name(pair.dtype), short)
    return pair


@torch.inference_mode()
def _difference(pair: Pair, ids: Tensor) -> Difference:
    logits = []
    for model in (pair.models["model"], pair.models["against"]):
        logits.append(model(ids[None].to(model.device), use_cache=False).logits[0].float())  # [S, V]
        check_logits(logits[-1], model)
    own, reference = (each.log_softmax(-1) for each in logits)
    kl = float(kl_divergence(reference, own).mean())
    largest = float((own - reference).abs().max())
    return Difference(dtype=dtype_name(pair.dtype), tokens=len(ids), largest=largest, kl=max(kl, 0.0))


def _simulated(
    prepared: Pair, evaluation_set: EvaluationSet, formats: Sequence[EngineFormat], progress: Progress
) -> Iterator[CacheLoss]:
    """The losses of formats as headwise simulates them, both models in the wider of their dtypes."""
    as_it_is = prepared.of_the_reference()
    for code in formats:
        before, after = (
            evaluate_windows(pair, evaluation_set, cache=str(code), progress=progress)
            for pair in (as_it_is, prepared)
        )
        yield CacheLoss(cache=str(code), engine=None, before=_loss(before), after=_loss(after))


def _in_its_engine(
    source: str | Path,
    output: Path,
    evaluation_set: EvaluationSet,
    code: EngineFormat,
    python: str | Path | None,
    notes: list[str],
    progress: Progress,
) -> list[CacheLoss]:
    """The loss that a format causes in its engine; nothing where headwise runs none, or it is not installed."""
    if (engine := RUNNABLE.get(code.engine)) is None:
        return []
    if not is_installed(engine.module, str(python or sys.executable)):
        where = "here: --engine-python names an interpreter that has it" if python is None else f"in {python}"
        notes.append(f"{NOT_MEASURED} in {engine.title} itself, which is not installed {where}")
        return []
    with ExitStack() as stack:
        original: str | Path = source
        # Both models are measured in one form: a source folder becomes a .gguf for as long as that takes.
        if output.suffix == ".gguf" and not isinstance(open_checkpoint(source), GgufCheckpoint):
            place = tempfile.TemporaryDirectory(prefix=".headwise-partial-", dir=output.resolve().parent)
            original = Path(stack.enter_context(place)) / "source.gguf"
            export_gguf(source, original, progress=progress)
        cache = str(code).partition(":")[2]
        scored = partial(
            evaluate_windows_in_engine, engine=code.engine, cache=cache, python=python, progress=progress
        )
        pairs = (open_pair(model, against=original) for model in (original, output))
        before, after = (scored(pair, evaluation_set) for pair in pairs)
    return [CacheLoss(cache=str(code), engine=after.engine, before=_loss(before), after=_loss(after))]


def _loss(evaluation: Evaluation) -> Loss:
    numbers = {field.name: getattr(evaluation, field.name) for field in fields(Loss)}
    assert None not in numbers.values()
    return Loss(**numbers)
