"""Evaluate a model beside its reference: perplexity, cache and speed; multiple choice, planted facts, retrieval."""

from headwise.evaluation.accuracy_intervals import Rate, rate
from headwise.evaluation.choices import Choice, ChoiceEvaluation, evaluate_choices, log_likelihoods, read_choices
from headwise.evaluation.evaluate import WINDOW, evaluate, evaluate_windows
from headwise.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.evaluation.planted import DepthScore, PlantedEvaluation, evaluate_planted
from headwise.evaluation.results import Evaluation, PositionScore, TextScore
from headwise.evaluation.retrieval import (
    Encoder,
    Pooling,
    RetrievalEvaluation,
    embed,
    evaluate_retrieval,
    load_encoder,
    read_pooling,
)
from headwise.evaluation.scoring import score_window
from headwise.evaluation.speed import Speed, decode_times
from headwise.renamed import moved_names, moved_to

__all__ = [
    "WINDOW",
    "Choice",
    "ChoiceEvaluation",
    "DepthScore",
    "Encoder",
    "Evaluation",
    "Pair",
    "PlantedEvaluation",
    "Pooling",
    "PositionScore",
    "Rate",
    "RetrievalEvaluation",
    "Speed",
    "TextScore",
    "check_vocabulary",
    "decode_times",
    "embed",
    "evaluate",
    "evaluate_choices",
    "evaluate_planted",
    "evaluate_retrieval",
    "evaluate_windows",
    "load_encoder",
    "log_likelihoods",
    "open_pair",
    "rate",
    "read_choices",
    "read_pooling",
    "score_window",
]

_TO_TEXTS = (
    "calibration_windows",
    "cut_windows",
    "hold_out",
    "language_reference",
    "read_jsonl",
    "read_source",
    "read_text",
    "refuse_twice",
    "text_identity",
    "token_ids",
    "token_windows",
    "usual_window",
    "windows_beyond",
    "wrapping_ids",
)
__getattr__ = moved_names(
    __name__, {**moved_to("headwise.texts", *_TO_TEXTS), **moved_to("headwise.checkpoints", "max_length")}
)
