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
    CACHE,
    ENGINE,
    ChoiceOptions,
    EngineOptions,
    EvaluateOptions,
    FactOptions,
    ItemOptions,
    PassageOptions,
    PlantedOptions,
    PythonOptions,
    RetrievalOptions,
    TextOptions,
)
from headwise.options.frontier import FrontierOptions, QuickFrontierOptions
from headwise.options.heal import HealOptions
from headwise.options.keywords import takes_options
from headwise.options.migrate import MOST_LOSS, MigrateOptions
from headwise.options.prepare import PrepareOptions
from headwise.options.sample import SampleOptions

__all__ = [
    "BITS",
    "CACHE",
    "ENGINE",
    "EVALUATION_WINDOWS",
    "KV_BUDGET",
    "MOST_LOSS",
    "SIZES",
    "STAGES",
    "TARGET",
    "CalibrateOptions",
    "CalibrationOptions",
    "ChoiceOptions",
    "ConvertOptions",
    "Declaration",
    "EngineOptions",
    "EvaluateOptions",
    "FactOptions",
    "FrontierOptions",
    "HealOptions",
    "ItemOptions",
    "MigrateOptions",
    "Options",
    "PassageOptions",
    "PlantedOptions",
    "PrepareOptions",
    "PythonOptions",
    "QuickFrontierOptions",
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
