"""Two texts of Python's language reference, which every Python has: one to calibrate on and one to evaluate on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.measure.texts.files import language_reference, reference_topics
from headwise.measure.texts.overlap import passages_apart


def write_reference_texts(folder: Path, tokenizer: Any) -> tuple[Path, Path]:
    """Write ``study.txt`` and ``exam.txt``, which share no passage.

    Every second topic is for calibration. Topics quote each other, so of the others only those that share no passage
    with the calibration text are for evaluation. For example
    ``write_reference_texts(Path("."), load_tokenizer(Path("./model")))``.

    Args:
        folder: for the two files.
        tokenizer: that says what a passage is.

    Returns:
        The paths of the two files.
    """
    study, exam = folder / "study.txt", folder / "exam.txt"
    text = language_reference(slice(0, None, 2))
    others = passages_apart(tokenizer, reference_topics(slice(1, None, 2)), text)
    study.write_text(text, encoding="utf-8")
    exam.write_text("\n\n".join(others), encoding="utf-8")
    return study, exam
