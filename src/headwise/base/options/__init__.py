"""How options are declared, and the options of each public function; nothing here imports torch."""

from headwise.base.options.convert import (
    BITS,
    EVALUATION_WINDOWS,
    KV_BUDGET,
    MOST_LOSS,
    SIZES,
    STAGES,
    TARGET,
    CalibrateOptions,
    CalibrationOptions,
    ConvertOptions,
    FrontierOptions,
    MigrateOptions,
    PrepareOptions,
    QuickFrontierOptions,
)
from headwise.base.options.declare import (
    Declaration,
    Options,
    Rule,
    at_least,
    declarations,
    each_of,
    not_empty,
    option,
    takes_options,
)
from headwise.base.options.evaluate import (
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
from headwise.base.options.heal import HealOptions, SampleOptions
