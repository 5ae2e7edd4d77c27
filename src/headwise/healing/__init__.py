"""Train a converted model until it behaves like the model it was converted from."""

from headwise.healing.heal import FILE, TRAINING, heal
from headwise.healing.objective import cross_entropy, divergence, divergence_from_top, hidden_error
from headwise.healing.report import Healing

__all__ = [
    "FILE",
    "TRAINING",
    "Healing",
    "cross_entropy",
    "divergence",
    "divergence_from_top",
    "heal",
    "hidden_error",
]
