"""Perplexity, divergence, agreement, cache bytes and decode time of a model beside its reference."""

from headwise.evaluation.evaluate import Evaluation, Speed, check_vocabulary, decode_times, evaluate
from headwise.evaluation.text import cut_windows, read_text, token_ids, token_windows

__all__ = [
    "Evaluation",
    "Speed",
    "check_vocabulary",
    "cut_windows",
    "decode_times",
    "evaluate",
    "read_text",
    "token_ids",
    "token_windows",
]
