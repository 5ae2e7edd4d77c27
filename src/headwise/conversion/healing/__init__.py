"""Train a converted model until it behaves like the model it was converted from."""

from headwise.conversion.healing.heal import TRAINING, heal
from headwise.conversion.healing.objective import cross_entropy, divergence, divergence_from_top, hidden_error
from headwise.conversion.healing.report import Healing
