"""Evaluate a model beside its reference: perplexity, cache and speed; multiple choice, facts, RULER, retrieval."""

from headwise.measure.evaluation.choices import (
    Choice,
    ChoiceEvaluation,
    evaluate_choices,
    log_likelihoods,
    read_choices,
)
from headwise.measure.evaluation.continuations import Continuations, compare_continuations, cut_prompts
from headwise.measure.evaluation.evaluate import WINDOW, evaluate, evaluate_windows
from headwise.measure.evaluation.model_pair import Pair, check_vocabulary, open_pair
from headwise.measure.evaluation.planted import DepthScore, PlantedEvaluation, evaluate_planted
from headwise.measure.evaluation.results import Evaluation, PositionScore, Rate, TextScore, compare_rates
from headwise.measure.evaluation.retrieval import (
    Encoder,
    Pooling,
    RetrievalEvaluation,
    embed_texts,
    evaluate_retrieval,
    load_encoder,
    read_pooling,
)
from headwise.measure.evaluation.ruler import RulerEvaluation, RulerScore, evaluate_ruler
from headwise.measure.evaluation.scoring import Speed, decode_times, score_window
