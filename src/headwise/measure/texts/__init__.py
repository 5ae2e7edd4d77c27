"""Texts as windows of tokens: sources, mixtures to calibrate on, passages that two texts share."""

from headwise.measure.texts.calibration_texts import (
    NO_TEXTS,
    CalibrationTexts,
    check_texts,
    open_windows,
    refuse_cross_layers,
    refuse_unknown_tokens,
)
from headwise.measure.texts.calibration_windows import calibration_windows, hold_out, windows_beyond
from headwise.measure.texts.files import language_reference, read_jsonl, read_text, reference_topics
from headwise.measure.texts.identity import refuse_twice, text_identity
from headwise.measure.texts.overlap import overlap_note, passages_apart, shared_fraction, shared_tokens
from headwise.measure.texts.reference import write_reference_texts
from headwise.measure.texts.sample import Sample, sample
from headwise.measure.texts.sources import named_texts, read_source, refuse_texts_within
from headwise.measure.texts.windows import (
    begun,
    cut_windows,
    ending_ids,
    first_ids,
    token_ids,
    token_windows,
    usual_window,
    wrapping_ids,
)

__all__ = [
    "NO_TEXTS",
    "CalibrationTexts",
    "Sample",
    "begun",
    "calibration_windows",
    "check_texts",
    "cut_windows",
    "ending_ids",
    "first_ids",
    "hold_out",
    "language_reference",
    "named_texts",
    "open_windows",
    "overlap_note",
    "passages_apart",
    "read_jsonl",
    "read_source",
    "read_text",
    "reference_topics",
    "refuse_cross_layers",
    "refuse_texts_within",
    "refuse_twice",
    "refuse_unknown_tokens",
    "sample",
    "shared_fraction",
    "shared_tokens",
    "text_identity",
    "token_ids",
    "token_windows",
    "usual_window",
    "windows_beyond",
    "wrapping_ids",
    "write_reference_texts",
]
