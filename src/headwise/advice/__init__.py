"""Advice: what to do with a model's cache on a device, and the rules of the guide that headwise began with."""

from headwise.advice.advise import MOST_SEQUENCES, USUAL_LOSS, Advice, Option, Question, advise, advise_on, ranked
from headwise.advice.candidates import AS_IT_IS, Candidate, candidates, predictable
from headwise.advice.design import design
from headwise.advice.guide import Guidance, Needs, Rule, Thresholds, guide, kv_heads
from headwise.advice.measured import (
    PREDICTED_ERROR,
    PREDICTED_WITHIN,
    Measured,
    by_target,
    read_measured,
    read_points,
)
from headwise.advice.next_measurement import Expected, expected_losses

__all__ = [
    "AS_IT_IS",
    "MOST_SEQUENCES",
    "PREDICTED_ERROR",
    "PREDICTED_WITHIN",
    "USUAL_LOSS",
    "Advice",
    "Candidate",
    "Expected",
    "Guidance",
    "Measured",
    "Needs",
    "Option",
    "Question",
    "Rule",
    "Thresholds",
    "advise",
    "advise_on",
    "by_target",
    "candidates",
    "design",
    "expected_losses",
    "guide",
    "kv_heads",
    "predictable",
    "ranked",
    "read_measured",
    "read_points",
]
