"""Train a converted model until it behaves like the model it was converted from."""

from headwise.healing.heal import TRAINING, heal
from headwise.healing.objective import cross_entropy, divergence, divergence_from_top, hidden_error
from headwise.healing.report import Healing

__all__ = [
    "TRAINING",
    "Healing",
    "cross_entropy",
    "divergence",
    "divergence_from_top",
    "heal",
    "hidden_error",
]
