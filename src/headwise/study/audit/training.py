"""Quality of decoders of one size that are trained from scratch on the same text, one of each mechanism.

A mechanism's loss is compared with MHA's seed by seed: the same seed means the same windows in the same order. Where
attention has fewer parameters, feed-forward networks are wider, so that all decoders have as many.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headwise import cost
from headwise.base.checksums import write_among_others
from headwise.base.options.heal import HealOptions
from headwise.base.progress import Progress, silent
from headwise.conversion.calibration.windows import plain_windows
from headwise.conversion.healing.loop import Loop
from headwise.conversion.healing.optimizer import TrainingState, optimizer_of
from headwise.conversion.healing.windows import HELD, HealingWindows
from headwise.errors import ArgumentError
from headwise.measure.texts import language_reference, read_text
from headwise.measure.timing.machine import describe_machine, installed_versions
from headwise.runtime.hf import as_device
from headwise.study.audit.audit import current_effort
from headwise.study.audit.claim import UntestableError
from headwise.study.audit.decoder import Decoder, Sizes, mechanisms, width_for

WINDOW, BATCH = 256, 16
"""The number of bytes in a window, and of windows in a training step."""
EVALUATION_WINDOWS = 64
"""The number of windows that the loss is measured on, from the end of the text."""
RATE = 2e-3
"""AdamW's greatest learning rate."""

_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantiles of Student's t by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The decoders of one mechanism, one for each seed.

    Attributes:
        mechanism: the mechanism's name.
        parameters: the number of parameters of one decoder.
        cache_values: the number of values that a layer caches for a token.
        losses: the losses in nats a byte on text that was not trained on, one for each seed.
        seconds: the seconds of training, all seeds together.
    """

    mechanism: str
    parameters: int
    cache_values: int
    losses: tuple[float, ...]
    seconds: float

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.losses)


@dataclass(frozen=True, kw_only=True)
class FromScratch:
    """Decoders of all mechanisms.

    Attributes:
        tokens: the number of bytes that each decoder was trained on.
        text: the name of the text.
        rows: the decoders of each mechanism, those of MHA among them.
    """

    tokens: int
    text: str
    rows: tuple[Trained, ...]

    def row(self, mechanism: str) -> Trained:
        """A mechanism by its name; ``latent`` is the latent space of half the hidden size.

        Raises:
            UntestableError: it was not trained.
        """
        name = next((row.mechanism for row in self.rows if row.mechanism.startswith("latent-")), "")
        wanted = name if mechanism == "latent" else mechanism
        for row in self.rows:
            if row.mechanism == wanted:
                return row
        raise UntestableError(f"no decoder with {mechanism} was trained")

    def percent_kept(self, mechanism: str) -> float:
        """MHA's perplexity a byte as a percentage of a mechanism's, the mean over seeds."""
        return 100 * math.exp(-self.beside_mha(mechanism)[0])

    def beside_mha(self, mechanism: str) -> tuple[float, float]:
        """A mechanism's loss less MHA's, seed by seed: the mean, and half of its 95 % interval."""
        pairs = zip(self.row(mechanism).losses, self.row("MHA").losses, strict=True)
        differences = [one - other for one, other in pairs]
        return statistics.fmean(differences), half_interval(differences)


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t; infinite for one value.

    For example ``half_interval([1.0, 1.0])`` is 0.
    """
    if len(values) < 2:
        return math.inf
    return _T[min(len(values), max(_T))] * statistics.stdev(values) / math.sqrt(len(values))


def train(
    output: str | Path,
    *,
    text: str | Path | None = None,
    tokens: int = 2_000_000,
    seeds: int = 3,
    names: Sequence[str] | None = None,
    device: str | None = None,
    sizes: Sizes | None = None,
    progress: Progress = silent,
) -> FromScratch:
    """Train decoders of all mechanisms from scratch, and keep their losses in a file; a killed run goes on.

    For example ``train("trained.json", text="wikitext.txt", tokens=500_000).beside_mha("MQA")``.

    Args:
        output: the file of the losses; mechanisms that it has are not trained again.
        text: the text to train on, whose end is measured on; Python's language reference when None.
        tokens: the number of bytes that each decoder is trained on.
        seeds: the number of decoders of each mechanism, at least 2.
        names: the names of the mechanisms, MHA among them; all when None.
        device: the device to train on; the CPU when None.
        sizes: the sizes of the decoders; those of `Sizes` when None.
        progress: the callback that reports each decoder.

    Raises:
        ArgumentError: a number is impossible, a name is not known, the text is too short, or the file is of another
            run.
    """
    sizes, path, place = sizes or Sizes(), Path(output), as_device(device)
    specs = mechanisms(sizes)
    chosen = list(names or specs)
    for name in chosen:
        if name not in specs:
            raise ArgumentError("mechanism", name, f"must be one of {', '.join(specs)}")
    if not 2 <= seeds <= max(_T):
        raise ArgumentError("seeds", seeds, f"must be 2 to {max(_T)}")
    windows = text_windows(language_reference() if text is None else read_text(text))
    settings = {
        "tokens": tokens,
        "text": "Python's language reference" if text is None else Path(text).name,
        "seeds": seeds,
        "sizes": asdict(sizes),
        "bytes": windows.numel(),
    }
    rows = _rows_of(path, settings)
    for index, name in enumerate(chosen):
        progress("training from scratch", index, len(chosen))
        if name in rows:
            continue
        spec = specs[name]
        losses, seconds, count = [], 0.0, 0
        for seed in range(seeds):
            decoder = spec_decoder(name, sizes, seed).to(place)
            count = sum(parameter.numel() for parameter in decoder.parameters())
            loss, took = train_one(decoder, windows, tokens=tokens, seed=seed)
            losses.append(loss)
            seconds += took
        rows[name] = Trained(
            mechanism=name,
            parameters=count,
            cache_values=cost.cache_values(spec),
            losses=tuple(losses),
            seconds=seconds,
        )
        document = {"settings": settings, "rows": {key: asdict(row) for key, row in rows.items()}}
        document |= {"machine": describe_machine(), "versions": installed_versions()}
        write_among_others(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    progress("training from scratch", len(chosen), len(chosen))
    return FromScratch(tokens=tokens, text=str(settings["text"]), rows=tuple(rows.values()))


def spec_decoder(name: str, sizes: Sizes, seed: int) -> Decoder:
    """A decoder of a mechanism, initialised from a seed. For example ``spec_decoder("MQA", Sizes(), 0)``."""
    spec = mechanisms(sizes)[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(spec, sizes, width_for(spec, sizes))


def text_windows(text: str) -> torch.Tensor:
    """A text's bytes as windows ``[N, WINDOW]``.

    Raises:
        ArgumentError: there are fewer than twice as many as are measured on.
    """
    ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    count = len(ids) // WINDOW
    if count < 2 * EVALUATION_WINDOWS:
        raise ArgumentError(
            "text", f"{len(ids)} bytes", f"must have at least {2 * EVALUATION_WINDOWS * WINDOW:,} bytes"
        )
    return ids[: count * WINDOW].view(count, WINDOW).long()


def train_one(decoder: Decoder, windows: torch.Tensor, *, tokens: int, seed: int) -> tuple[float, float]:
    """Train a decoder by cross-entropy, as healing does; its loss on the last windows, and the seconds.

    Args:
        decoder: the decoder with its initial weights.
        windows: token ids, ``[N, W]``; the loss is measured on the last windows.
        tokens: the number of tokens to train on.
        seed: the seed of the order of the windows.
    """
    read = HealingWindows(
        train=plain_windows(windows[: -EVALUATION_WINDOWS - HELD]),
        held_out=windows[-EVALUATION_WINDOWS - HELD : -EVALUATION_WINDOWS],
        batch=BATCH,
        steps=max(tokens // (WINDOW * BATCH), 1),
        seed=seed,
        read_tokens=windows.numel(),
    )
    options = HealOptions(
        teacher="none",
        text="none",
        objective="cross-entropy",
        learning_rate=RATE,
        optimizer="adamw",
        micro_batch=BATCH,
        batch=BATCH,
        patience=0,
        measurements=1,
    )
    parameters = dict(decoder.named_parameters())
    optimizer = optimizer_of(decoder, parameters, options.optimizer, dtype=torch.float32)
    loop = Loop(decoder, None, parameters, read, options, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        done = loop.run(TrainingState(Path(folder), parameters, optimizer), optimizer, silent)
    with torch.no_grad():
        evaluation = plain_windows(windows[-EVALUATION_WINDOWS:])
        losses = [float(loop._loss(evaluation[row : row + BATCH])) for row in range(0, EVALUATION_WINDOWS, BATCH)]
    return statistics.fmean(losses), done.seconds


def trained_decoders() -> FromScratch:
    """The trained decoders whose file the running audit was given.

    Raises:
        UntestableError: the audit was given no file.
    """
    path = current_effort().trained
    if path is None:
        raise UntestableError("needs decoders trained from scratch: headwise audit --train")
    return from_document(json.loads(path.read_text(encoding="utf-8")))


def from_document(document: Mapping[str, Any]) -> FromScratch:
    """The decoders of a file that `train` wrote. For example ``from_document(json.loads(text)).row("MQA").loss``."""
    rows = tuple(_row(row) for row in document["rows"].values())
    return FromScratch(tokens=document["settings"]["tokens"], text=document["settings"]["text"], rows=rows)


def _rows_of(path: Path, settings: Mapping[str, Any]) -> dict[str, Trained]:
    """The rows of an earlier run.

    Raises:
        ArgumentError: it had other settings.
    """
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        was, rows = document["settings"], {name: _row(row) for name, row in document["rows"].items()}
    except (ValueError, KeyError, TypeError, OSError):
        raise ArgumentError("trained", str(path), "is no file that headwise audit --train wrote") from None
    for name, value in settings.items():
        if was.get(name) != value:
            raise ArgumentError(
                "trained", str(path), f"is of another run, with {name} = {was.get(name)}, not {value}"
            )
    return rows


def _row(row: Mapping[str, Any]) -> Trained:
    return Trained(**{**row, "losses": tuple(row["losses"])})
