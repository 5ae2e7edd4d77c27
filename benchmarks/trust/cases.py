"""The commands that write, on inputs so small that each can be made to fail many times, and what stays equal.

`make_inputs` makes a random Llama of three layers with a byte-level tokenizer, what is converted or exported of it,
and two texts. Of a case with ``real`` the source is the real SmolLM2-135M instead.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.byte_level import save_byte_level
from tests.real_models import tiny_model

import headwise
from headwise.conversion import export_gguf
from headwise.models.checkpoints import open_checkpoint
from headwise.models.specs.sources import BUNDLED

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 512,
}

_TIMED = ("seconds", "_ms", "per_second", "peak_")
"""Parts of the names of fields that say how long something took, or how much memory."""


@dataclass(frozen=True)
class Case:
    """A command that writes.

    Attributes:
        words: its command line for an output, in the folder that has ``inputs``.
        output: the name of the output.
        whole: the files of the output that appear at its end; the output itself where there are none. The others are
            results, each of which is kept as soon as it is there.
        real: whether its source is SmolLM2-135M.
        kills: how many kills a campaign tries by default.
    """

    words: tuple[str, ...]
    output: str = "out"
    whole: tuple[str, ...] = ()
    real: bool = False
    kills: int = 9


def _study(tokens: int) -> tuple[str, ...]:
    return "--calibrate", "inputs/study.txt", "--calibration-tokens", f"{tokens}"


_MODEL, _EXAM = "inputs/model", ("--evaluate", "inputs/exam.txt")
_LATENT = ("--to", "mla", "--kv-budget", "0.5")
_CACHE = "llama.cpp:q4_0"
_TAUGHT = ("--teacher", _MODEL, "--text", "inputs/study.txt", "--tokens", "1024", "--no-evaluate")
_SIZES = ("--target", "mla:0.5", "--target", "mla:0.25")

CASES: dict[str, Case] = {
    "convert": Case(("convert", _MODEL, "out", *_LATENT, "--spread", *_study(512), "--no-evaluate")),
    "convert, in codes, evaluated": Case(
        ("convert", _MODEL, "out", "--to", "mla", "--kv-bytes", "0.3", *_study(512), *_EXAM)
    ),
    "convert, deepseek": Case(
        ("convert", _MODEL, "out", *_LATENT, "--format", "deepseek", *_study(512), "--no-evaluate")
    ),
    "convert, gguf": Case(("convert", _MODEL, "out", *_LATENT, "--format", "gguf", *_study(512), "--no-evaluate")),
    "calibrate": Case(("calibrate", _MODEL, "out", *_study(512))),
    "prepare, folder": Case(("prepare", _MODEL, "out", "--for", _CACHE, *_study(512))),
    "prepare, gguf": Case(("prepare", "inputs/model.gguf", "out.gguf", "--for", _CACHE), output="out.gguf"),
    "prepare, folder to gguf": Case(("prepare", _MODEL, "out.gguf", "--for", _CACHE), output="out.gguf"),
    "heal": Case(("heal", "inputs/half", "out", *_TAUGHT)),
    "heal, gguf": Case(("heal", "inputs/model.gguf", "out.gguf", *_TAUGHT, "--cache", _CACHE), output="out.gguf"),
    "frontier": Case(
        ("frontier", _MODEL, "--output", "out", "--target", "kivi4", "--target", "mla:0.5", *_study(512), *_EXAM),
        whole=("frontier.json", "frontier.md", "frontier.html"),
        kills=14,
    ),
    "frontier --quick": Case(
        ("frontier", _MODEL, "--quick", "--output", "out", "--calibrate", "inputs/study.txt", "--target", "kivi4"),
        whole=("predicted.json",),
    ),
    "migrate": Case(("migrate", _MODEL, "out", "--max-quality-loss", "9", *_SIZES, *_study(512), *_EXAM), kills=14),
    "migrate, trained": Case(
        (
            "migrate",
            _MODEL,
            "out",
            "--max-quality-loss",
            "0.1",
            "--heal-tokens",
            "1024",
            *_SIZES,
            *_study(512),
            *_EXAM,
        )
    ),
    "sample": Case(("sample", _MODEL, "out.txt", "--tokens", "800", "--length", "64"), output="out.txt"),
    "export": Case(("export", _MODEL, "out.gguf", "--outtype", "f16"), output="out.gguf"),
    "report": Case(("report", _MODEL, "--html", "out.html"), output="out.html", kills=3),
    "convert, SmolLM2-135M": Case(
        ("convert", BUNDLED, "out", *_LATENT, "--spread", *_study(512), "--no-evaluate"), real=True, kills=3
    ),
    "prepare, SmolLM2-135M": Case(
        ("prepare", BUNDLED, "out.gguf", "--for", _CACHE), output="out.gguf", real=True, kills=6
    ),
    "heal, SmolLM2-135M": Case(
        ("heal", "inputs/half-135m", "out", "--teacher", BUNDLED, *_TAUGHT[2:]),
        real=True,
        kills=2,
    ),
}
"""The cases by name."""


def make_inputs(folder: Path, text: Path | None, *, real: bool) -> None:
    """Make the inputs of all cases.

    Args:
        folder: the folder to make.
        text: the file that both texts are cut from; sentences made up here when None.
        real: whether a conversion of SmolLM2-135M is among them.
    """
    folder.mkdir(parents=True)
    written = (
        "".join(f"{index} bottles stand on the wall, and {index * 7} more. " for index in range(400))
        if text is None
        else text.read_text(encoding="utf-8")[:40_000]
    )
    (folder / "study.txt").write_text(written[: len(written) * 3 // 4])
    (folder / "exam.txt").write_text(written[-3000:])
    model = folder / "model"
    tiny_model(**SIZES).float().save_pretrained(model)
    save_byte_level(model, SIZES["vocab_size"])
    export_gguf(model, folder / "model.gguf")
    headwise.convert(model, folder / "half", to="mla", kv_budget=0.5, evaluate=False)
    if real:
        headwise.convert(BUNDLED, folder / "half-135m", to="mla", kv_budget=0.5, evaluate=False)


def hashes(folder: Path, *, real: bool) -> dict[str, str]:
    """The digest of each input."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files += open_checkpoint(BUNDLED).files if real else []
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def content(output: Path) -> dict[str, bytes]:
    """What must be equal in two outputs of one command: all bytes, without what says how long something took.

    Of pages, whose numbers stand in a JSON file beside them too, the words count. Lists of checksums are left out:
    they follow from the rest.
    """
    files = [output] if output.is_file() else [file for file in output.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(output)): _untimed(file)
        for file in files
        if file.name != "SHA256SUMS" and file.suffix != ".sha256"
    }


def _untimed(file: Path) -> bytes:
    raw = file.read_bytes()
    if file.suffix == ".json":
        return json.dumps(_without_times(json.loads(raw))).encode()
    if file.suffix in (".md", ".html"):
        return re.sub(rb"\d[\d.,]*", b"#", raw)
    return raw


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        timed = [key for key in value if any(part in key for part in _TIMED)]
        return {key: _without_times(one) for key, one in value.items() if key not in timed}
    return [_without_times(one) for one in value] if isinstance(value, list) else value
