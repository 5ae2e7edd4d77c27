"""Models changed without a change of what they compute, so that engines' own small caches lose less of them."""

from headwise.conversion.preparation.prepare import Preparation, prepare
from headwise.conversion.preparation.proof import Proof
