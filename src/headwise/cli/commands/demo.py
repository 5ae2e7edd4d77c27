"""``headwise demo``: every step on SmolLM2-135M's real weights, from model folder to evaluation."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwise.base.progress import Progress
from headwise.base.tables import Table, bytes_text, count_text
from headwise.cli.app import STUDY, Json, app, emit, err, out, progress_bar
from headwise.errors import ArgumentError, CheckpointError

CONVERSIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mha", {"to": "mha"}),
    ("mqa-mean", {"to": "mqa", "method": "mean"}),
    ("mla-lossless", {"to": "mla", "kv_budget": 1.0}),
    ("mla-half", {"to": "mla", "kv_budget": 0.5}),
)
CALIBRATION_TOKENS = 8192  # Half the default, so that everything ends within five minutes on two cores.
PROMPT = "The capital of France is Paris, and the capital of Italy is"


@app.command(epilog="Example: headwise demo --output demo", rich_help_panel=STUDY)
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the models, the text and result.json.")] = Path("demo"),
    windows: Annotated[int, typer.Option(help="Windows of 2048 tokens to evaluate on.")] = 1,
    as_json: Json = False,
) -> None:
    """Inspect, compare, convert, evaluate and generate on SmolLM2-135M's real weights, and write the results."""
    start = time.perf_counter()
    console = err if as_json else out
    import headwise
    from headwise.measure.texts import write_reference_texts
    from headwise.models.checkpoints import load_tokenizer
    from headwise.models.specs.sources import bundled_gguf

    _check_weights()
    if windows < 1:
        raise ArgumentError("windows", windows, "must be at least 1")
    try:
        output.mkdir(parents=True, exist_ok=True)
        texts = write_reference_texts(output, load_tokenizer(bundled_gguf()))
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be written: {error.strerror}") from None
    original = output / "original"
    with progress_bar() as progress:
        costs = _unpack_and_count(original, console, progress)
        console.print("[bold]4 convert, evaluate, generate[/bold]")
        results = []
        for name, target in CONVERSIONS:
            result = _convert(original, output / name, target, texts, windows, progress)
            console.print(f"  {name}: perplexity × {result['evaluate']['perplexity_ratio']:.4f}")
            results.append({"name": name, **result})
        continuation = headwise.generate(original, PROMPT, max_new_tokens=12)
    document = {
        "model": "SmolLM2-135M-Instruct, dequantised from Q4_1",
        "text": "Python's language reference (pydoc_data.topics): every second topic, unless it repeats others",
        "calibration": f"{CALIBRATION_TOKENS:,} tokens of its other topics, for mla-half",
        "machine": {"processor": platform.machine(), "python": platform.python_version(), **_versions()},
        **costs,
        "generate": continuation.to_dict(),
        "conversions": results,
        "seconds": time.perf_counter() - start,
    }
    (output / "result.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        emit(document)
    else:
        _show(document, output / "result.json")


def _check_weights() -> None:
    """Refuse a bundled model other than the one that the documented figures were measured on.

    Raises:
        CheckpointError: the file has another digest.
    """
    from headwise.models.specs.sources import BUNDLED_SHA256, bundled_gguf

    digest = hashlib.sha256(bundled_gguf().read_bytes()).hexdigest()
    if not digest.startswith(BUNDLED_SHA256):
        raise CheckpointError("smollm2-135m sha256", digest[:16], f"must begin {BUNDLED_SHA256}: another file")


def _unpack_and_count(original: Path, console: Console, progress: Progress) -> dict[str, Any]:
    """Run the first three steps: unpack the model, inspect it and compare mechanisms."""
    import headwise
    from headwise.models.specs.sources import BUNDLED

    console.print("[bold]1 unpack[/bold] SmolLM2-135M-Instruct, dequantised from Q4_1, as a model folder")
    headwise.convert(BUNDLED, original, to="gqa:3", evaluate=False, overwrite=True, progress=progress)
    console.print("[bold]2 inspect[/bold]")
    inspection = headwise.inspect(original, dtype="float32")
    console.print(
        f"  {inspection.num_layers} layers of {inspection.layers[0].label} (query/key–value heads × head dim): "
        f"{bytes_text(inspection.kv_bytes_per_token)} of float32 cache a token"
    )
    console.print("[bold]3 compare[/bold] at 8192 tokens")
    comparison = headwise.compare(original, context=8192, dtype="float32")
    for row in comparison.rows:
        mark = "  ◂ this model" if row.is_source else ""
        console.print(f"  {row.label:<16} {bytes_text(row.kv_bytes):>10}{mark}")
    return {"inspect": inspection.to_dict(), "compare": [row.to_dict() for row in comparison.rows]}


def _convert(
    original: Path, folder: Path, target: dict[str, Any], texts: tuple[Path, Path], windows: int, progress: Progress
) -> dict[str, Any]:
    """Convert the model, evaluate the result and continue the prompt with it.

    Raises:
        CheckpointError: the evaluation failed.
    """
    import headwise

    study, exam = texts
    is_lossy = target.get("kv_budget", 1.0) < 1.0
    if is_lossy:
        target = {**target, "calibrate": study, "calibration_tokens": CALIBRATION_TOKENS, "evaluate": exam}
    conversion = headwise.convert(
        original,
        folder,
        **{"evaluate": False, **target},
        evaluation_windows=windows,
        overwrite=True,
        progress=progress,
    )
    evaluation = conversion.evaluation
    if is_lossy and evaluation is None:
        raise CheckpointError("evaluation", folder.name, conversion.notes[-1])
    if evaluation is None:  # Exact: measured alone, since a comparison with plain quantisation would say nothing.
        evaluation = headwise.evaluate(folder, text=exam, windows=windows, against=original, progress=progress)
    continuation = headwise.generate(folder, PROMPT, max_new_tokens=12)
    return {
        "convert": {key: value for key, value in conversion.to_dict().items() if key != "evaluation"},
        "evaluate": evaluation.to_dict(),
        "generate": continuation.to_dict(),
    }


def _show(document: dict[str, Any], file: Path) -> None:
    results = document["conversions"]
    out.print_table(_table(results))
    out.print(f"{PROMPT}…", markup=False)
    continuations = [("original", document["generate"])]
    continuations += [(result["name"], result["generate"]) for result in results]
    for name, continuation in continuations:
        out.print(f"  {name:<13} {continuation['text']!r}", markup=False)
    out.print(f"{document['seconds']:.0f} s; all measurements are in {file}")


def _versions() -> dict[str, str]:
    import torch
    import transformers

    import headwise

    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "transformers": transformers.__version__,
        "headwise": headwise.__version__,
    }


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(["", "B/token", "perplexity", "ratio", "KL", "top-1", "ms (orig)", "size"])
    first = results[0]
    evaluation = first["evaluate"]
    reference = {
        "cache_bytes_per_token": evaluation["reference_cache_bytes_per_token"],
        "perplexity": evaluation["reference_perplexity"],
        "perplexity_ratio": 1.0,
        "kl": 0.0,
        "top1_agreement": 1.0,
        "decode_ms": evaluation["reference_decode_ms"],
        "reference_decode_ms": evaluation["reference_decode_ms"],
    }
    rows = [("original", reference, first["convert"]["parameters_before"])]
    rows += [(result["name"], result["evaluate"], result["convert"]["parameters_after"]) for result in results]
    for name, numbers, parameters in rows:
        table.add(
            name,
            f"{numbers['cache_bytes_per_token']:,.0f}",
            f"{numbers['perplexity']:.5g}",
            f"{numbers['perplexity_ratio']:.5g}",
            f"{numbers['kl']:.4f}",
            f"{numbers['top1_agreement']:.1%}",
            f"{numbers['decode_ms']:.1f} ({numbers['reference_decode_ms']:.1f})",
            f"{count_text(parameters)}",
        )
    return table
