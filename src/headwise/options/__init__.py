"""How options are declared, and the options of each public function; nothing here imports torch."""

from headwise.options.convert import (
    BITS,
    EVALUATION_WINDOWS,
    KV_BUDGET,
    SIZES,
    STAGES,
    TARGET,
    CalibrateOptions,
    CalibrationOptions,
    ConvertOptions,
)
from headwise.options.declare import Declaration, Options, Rule, at_least, declarations, each_of, not_empty, option
from headwise.options.evaluate import (
    ChoiceOptions,
    EvaluateOptions,
    FactOptions,
    ItemOptions,
    PlantedOptions,
    RetrievalOptions,
    TextOptions,
)
from headwise.options.frontier import FrontierOptions
from headwise.options.heal import HealOptions
from headwise.options.keywords import takes_options
from headwise.options.migrate import MigrateOptions
from headwise.options.prepare import PrepareOptions
from headwise.options.sample import SampleOptions

__all__ = [
    "BITS",
    "EVALUATION_WINDOWS",
    "KV_BUDGET",
    "SIZES",
    "STAGES",
    "TARGET",
    "CalibrateOptions",
    "CalibrationOptions",
    "ChoiceOptions",
    "ConvertOptions",
    "Declaration",
    "EvaluateOptions",
    "FactOptions",
    "FrontierOptions",
    "HealOptions",
    "ItemOptions",
    "MigrateOptions",
    "Options",
    "PlantedOptions",
    "PrepareOptions",
    "RetrievalOptions",
    "Rule",
    "SampleOptions",
    "TextOptions",
    "at_least",
    "declarations",
    "each_of",
    "not_empty",
    "option",
    "takes_options",
]
