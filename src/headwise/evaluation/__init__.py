"""Perplexity, divergence, agreement, cache bytes and decode time of a model beside its reference."""

from headwise.evaluation.evaluate import Evaluation, Speed, cache_nbytes, check_vocabulary, decode_times, evaluate
from headwise.evaluation.text import read_text, token_windows

__all__ = [
    "Evaluation",
    "Speed",
    "cache_nbytes",
    "check_vocabulary",
    "decode_times",
    "evaluate",
    "read_text",
    "token_windows",
]
