"""``headwise demo``: the main job on SmolLM2-135M's real weights, from the model folder to a page of measurements."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.base.checksums import write_among_others
from headwise.base.progress import Progress
from headwise.base.tables import Table, bytes_text
from headwise.cli.app import STUDY, Json, app, emit, err, out, progress_bar
from headwise.errors import ArgumentError, CheckpointError

ENGINE_CACHES = ("llama.cpp:q8_0", "llama.cpp:q4_0", "vllm:fp8", "mlx:4")
"""The caches of engines whose losses are predicted from one pass over a little text."""

PREPARED = "llama.cpp:q4_0"
"""The cache that a copy of the model is prepared for."""

SMALL = "mla@0.25"
"""The target of the conversion: a quarter of the bytes of a bfloat16 cache."""

MEASURED = ("kivi4", "kivi3:32", SMALL)
"""The plain formats that are measured beside the conversion: those of about its bytes."""

TOKENS = 8192
"""The number of tokens that the conversion is calibrated on: half of the default, whose cost docs/scale.md states."""

PROMPT = "The capital of France is Paris, and the capital of Italy is"


@app.command(epilog="Example: headwise demo --output demo", rich_help_panel=STUDY)
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the models, the texts, the page and result.json.")] = Path(
        "demo"
    ),
    windows: Annotated[int, typer.Option(help="Windows of 2048 tokens to evaluate on.")] = 1,
    as_json: Json = False,
) -> None:
    """Inspect, predict, prepare, convert, evaluate and generate on the real SmolLM2-135M, and draw the result."""
    import headwise
    from headwise.measure.texts import write_reference_texts
    from headwise.models.checkpoints import load_tokenizer
    from headwise.models.specs.sources import bundled_gguf

    _check_weights()
    if windows < 1:
        raise ArgumentError("windows", windows, "must be at least 1")
    try:
        output.mkdir(parents=True, exist_ok=True)
        study, exam = write_reference_texts(output, load_tokenizer(bundled_gguf()))
    except OSError as error:
        raise ArgumentError("output", str(output), f"cannot be written: {error.strerror}") from None
    run = _Run(output, as_json=as_json)
    with progress_bar() as progress:
        original, inspection = _unpack(run, progress)
        run.begin("predict", "what the caches of engines lose, from one pass over 2,048 tokens")
        predicted = headwise.quick_frontier(original, calibrate=study, targets=ENGINE_CACHES, progress=progress)
        run.show(_predicted(predicted))
        run.begin("prepare", f"a copy that computes the same and loses less in {PREPARED}")
        options = {"calibrate": study, "evaluate": exam, "evaluation_windows": windows, "overwrite": True}
        prepared = headwise.prepare(original, output / "prepared", cache=PREPARED, **options, progress=progress)
        run.show(_losses(prepared))
        frontier = _convert(run, original, (study, exam), windows, progress)
        run.begin("generate", "greedily, by the original and by the conversion with its cache in codes")
        folders = (original, output / "frontier" / "models" / SMALL)
        continuations = [headwise.generate(folder, PROMPT, max_new_tokens=12) for folder in folders]
        for folder, continuation in zip(folders, continuations, strict=True):
            run.say(f"{folder.name:<9} {PROMPT}…{continuation.text!r}")
    document = {
        "model": "SmolLM2-135M-Instruct, dequantised from Q4_1",
        "text": "Python's language reference (pydoc_data.topics): every second topic, unless it repeats others; its"
        " other topics are calibrated on",
        "machine": {"processor": platform.machine(), "python": platform.python_version(), **_versions()},
        "inspect": inspection.to_dict(),
        "predicted": predicted.to_dict(),
        "prepared": prepared.to_dict(),
        "frontier": frontier.to_dict(),
        "generate": [continuation.to_dict() for continuation in continuations],
        "seconds": run.finish(),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_among_others(output / "result.json", text.encode())
    if as_json:
        emit(document)


class _Run:
    """The steps of the demonstration, as they are printed, and the seconds of each.

    Args:
        output: the folder of the results.
        as_json: print the steps on stderr, because stdout is for JSON.
    """

    def __init__(self, output: Path, *, as_json: bool) -> None:
        self.output, self._console = output, err if as_json else out
        self._steps: dict[str, float] = {}
        self._step, self._since, self._start = "", time.perf_counter(), time.perf_counter()

    def begin(self, step: str, what: str) -> None:
        """Print that a step begins."""
        self._end()
        self._step = step
        self._console.print(f"[bold]{len(self._steps) + 1} {step}[/bold] {what}")

    def say(self, line: str) -> None:
        """Print a line of the step."""
        self._console.print(f"  {line}", markup=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """Print a table of the step."""
        self._console.print_table(table)

    def finish(self) -> dict[str, float]:
        """Print where the results are.

        Returns:
            The seconds of each step, and of all.
        """
        self._end()
        seconds = self._steps | {"all": time.perf_counter() - self._start}
        shares = ", ".join(f"{step} {taken:.0f}" for step, taken in self._steps.items())
        self.say(f"{seconds['all']:.0f} s ({shares})")
        page = self.output / "frontier" / "frontier.html"
        self.say(f"{self.output / 'result.json'} has all measurements" + f", {page} draws them" * page.exists())
        return seconds

    def _end(self) -> None:
        now = time.perf_counter()
        if self._step:
            self._steps[self._step] = now - self._since
        self._since = now


def _check_weights() -> None:
    """Refuse a bundled model other than the one that the documented figures were measured on.

    Raises:
        CheckpointError: the file has another digest.
    """
    from headwise.models.specs.sources import BUNDLED_SHA256, bundled_gguf

    digest = hashlib.sha256(bundled_gguf().read_bytes()).hexdigest()
    if not digest.startswith(BUNDLED_SHA256):
        raise CheckpointError("smollm2-135m sha256", digest[:16], f"must begin {BUNDLED_SHA256}: another file")


def _unpack(run: _Run, progress: Progress) -> tuple[Path, Any]:
    """Write the original as a folder, and inspect it."""
    import headwise
    from headwise.models.specs.sources import BUNDLED

    run.begin("unpack", "SmolLM2-135M-Instruct, dequantised from Q4_1, as a model folder")
    original = run.output / "original"
    headwise.convert(BUNDLED, original, to="gqa:3", evaluate=False, overwrite=True, progress=progress)
    run.begin("inspect", "its layers and its cache")
    inspection = headwise.inspect(original, dtype="bfloat16")
    layers = f"{inspection.num_layers} layers of {inspection.layers[0].label}"
    cache = f"{bytes_text(inspection.kv_bytes_per_token)} of bfloat16 cache a token"
    run.say(f"{layers} (query/key–value heads × head dim): {cache}")
    return original, inspection


def _convert(run: _Run, original: Path, texts: tuple[Path, Path], windows: int, progress: Progress) -> Any:
    """Convert the original, and measure the result beside plain formats."""
    import headwise

    run.begin("convert", f"to {SMALL} by {TOKENS:,} tokens, and measure it beside plain formats of about its bytes")
    frontier = headwise.frontier(
        original,
        run.output / "frontier",
        targets=MEASURED,
        calibrate=texts[0],
        calibration_tokens=TOKENS,
        evaluate=texts[1],
        windows=windows,
        keep=True,
        plot=importlib.util.find_spec("matplotlib") is not None,
        progress=progress,
    )
    run.show(_measured(frontier))
    return frontier


def _predicted(predicted: Any) -> Table:
    table = Table(["engine's cache", "of bfloat16", "predicted loss, KL in nats"])
    for point in predicted.points:
        table.add(point.target, f"{point.cache_fraction:.1%}", f"{point.kl:.4f}")
    return table


def _losses(prepared: Any) -> Table:
    table = Table(["perplexity, × that with a full cache", "as it is", "prepared"])
    for loss in prepared.proof.caches:
        sides: Sequence[Any] = (loss.before, loss.after)
        table.add(loss.cache, *(f"×{side.perplexity_ratio:.4f} (KL {side.kl:.4f})" for side in sides))
    return table


def _measured(frontier: Any) -> Table:
    table = Table(["cache", "of bfloat16", "perplexity", "KL, nats", "its 99.9 %", "top-1"])
    for point in frontier.points:
        table.add(
            point.target,
            f"{point.cache_fraction:.1%}",
            f"×{point.perplexity_ratio:.4f}",
            f"{point.kl:.4f}",
            f"{point.kl_999:.4f}",
            f"{point.top1_agreement:.1%}",
        )
    return table


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
