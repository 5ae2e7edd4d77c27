"""Advice: what to do with a model's cache on a device, and the rules of the guide that headwise began with."""

from headwise.decide.advice.advise import (
    MOST_SEQUENCES,
    USUAL_LOSS,
    Advice,
    Option,
    Question,
    advise,
    advise_on,
    judged,
    ranked,
)
from headwise.decide.advice.candidates import AS_IT_IS, Alternative, candidates, predictable
from headwise.decide.advice.design import design
from headwise.decide.advice.next_measurement import Expected, expected_losses
from headwise.measure.points import PREDICTED_ERROR, PREDICTED_WITHIN, Measured, by_target, read_measured, read_points
