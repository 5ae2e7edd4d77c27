"""Perplexity, divergence, agreement, cache bytes and decode time of a model beside its reference."""

from headwise.evaluation.calibration import calibration_windows, hold_out, read_source
from headwise.evaluation.evaluate import Evaluation, Speed, check_vocabulary, decode_times, evaluate
from headwise.evaluation.text import cut_windows, read_text, token_ids, token_windows

__all__ = [
    "Evaluation",
    "Speed",
    "calibration_windows",
    "check_vocabulary",
    "cut_windows",
    "decode_times",
    "evaluate",
    "hold_out",
    "read_source",
    "read_text",
    "token_ids",
    "token_windows",
]
