"""headwise: choose, convert, run and prove attention.

The public names below are loaded when first used, so that a question about a config never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ArgumentError": "headwise.errors",
    "AttentionCache": "headwise.runtime.attention",
    "CalibrateOptions": "headwise.base.options",
    "Calibration": "headwise.conversion",
    "CheckpointError": "headwise.errors",
    "ChoiceEvaluation": "headwise.measure.evaluation",
    "ChoiceOptions": "headwise.base.options",
    "Comparison": "headwise.costs.formulas",
    "Complexity": "headwise.costs.formulas",
    "Conversion": "headwise.conversion",
    "ConvertOptions": "headwise.base.options",
    "Count": "headwise.study.counting",
    "EngineOptions": "headwise.base.options",
    "EvaluateOptions": "headwise.base.options",
    "Evaluation": "headwise.measure.evaluation",
    "ExpertLatentAttention": "headwise.runtime.attention",
    "ExpertLatentSpec": "headwise.models.specs",
    "Frontier": "headwise.conversion.frontiers",
    "FrontierOptions": "headwise.base.options",
    "Generation": "headwise.runtime.hf",
    "GroupedQueryAttention": "headwise.runtime.attention",
    "GroupedSpec": "headwise.models.specs",
    "HeadwiseError": "headwise.errors",
    "HealOptions": "headwise.base.options",
    "Healing": "headwise.conversion.healing",
    "Inspection": "headwise.costs.formulas",
    "LatentSpaceAttention": "headwise.runtime.attention",
    "LatentSpaceSpec": "headwise.models.specs",
    "LatentSpec": "headwise.models.specs",
    "LayerCounts": "headwise.study.counting",
    "MissingExtraError": "headwise.errors",
    "MigrateOptions": "headwise.base.options",
    "Migration": "headwise.conversion.migrate",
    "ModelSpec": "headwise.models.specs",
    "MultiHeadAttention": "headwise.runtime.attention",
    "MultiHeadLatentAttention": "headwise.runtime.attention",
    "MultiQueryAttention": "headwise.runtime.attention",
    "PlantedEvaluation": "headwise.measure.evaluation",
    "PlantedOptions": "headwise.base.options",
    "Preparation": "headwise.conversion.preparation",
    "PrepareOptions": "headwise.base.options",
    "QuickFrontier": "headwise.conversion.frontiers",
    "QuickFrontierOptions": "headwise.base.options",
    "RetrievalEvaluation": "headwise.measure.evaluation",
    "RulerEvaluation": "headwise.measure.evaluation",
    "RetrievalOptions": "headwise.base.options",
    "RulerOptions": "headwise.base.options",
    "RopeSpec": "headwise.models.specs",
    "RotaryEmbedding": "headwise.runtime.attention",
    "Sample": "headwise.measure.texts",
    "SampleOptions": "headwise.base.options",
    "SelfAttention": "headwise.runtime.attention",
    "SpecError": "headwise.errors",
    "StorageError": "headwise.errors",
    "Verification": "headwise.base.checksums",
    "attend": "headwise.runtime.kernels",
    "attend_with_weights": "headwise.runtime.kernels",
    "calibrate": "headwise.conversion",
    "choose_backend": "headwise.runtime.kernels",
    "compare": "headwise.costs.formulas",
    "complexity": "headwise.costs.formulas",
    "convert": "headwise.conversion",
    "count": "headwise.study.counting",
    "count_layer": "headwise.study.counting",
    "doctor": "headwise.measure.timing",
    "evaluate": "headwise.measure.evaluation",
    "evaluate_choices": "headwise.measure.evaluation",
    "evaluate_in_engine": "headwise.serving.engines",
    "evaluate_planted": "headwise.measure.evaluation",
    "evaluate_retrieval": "headwise.measure.evaluation",
    "evaluate_ruler": "headwise.measure.evaluation",
    "frontier": "headwise.conversion.frontiers",
    "generate": "headwise.runtime.hf",
    "heal": "headwise.conversion.healing",
    "inspect": "headwise.costs.formulas",
    "load": "headwise.runtime.hf",
    "migrate": "headwise.conversion.migrate",
    "optimize": "headwise.runtime.hf",
    "quick_frontier": "headwise.conversion.frontiers",
    "sample": "headwise.measure.texts",
    "prepare": "headwise.conversion.preparation",
    "serve": "headwise.serving.serve",
    "verify": "headwise.base.checksums",
}

if TYPE_CHECKING:
    from headwise.base.checksums import Verification, verify
    from headwise.base.options import (
        CalibrateOptions,
        ChoiceOptions,
        ConvertOptions,
        EngineOptions,
        EvaluateOptions,
        FrontierOptions,
        HealOptions,
        MigrateOptions,
        PlantedOptions,
        PrepareOptions,
        QuickFrontierOptions,
        RetrievalOptions,
        RulerOptions,
        SampleOptions,
    )
    from headwise.conversion import Calibration, Conversion, calibrate, convert
    from headwise.conversion.frontiers import Frontier, QuickFrontier, frontier, quick_frontier
    from headwise.conversion.healing import Healing, heal
    from headwise.conversion.migrate import Migration, migrate
    from headwise.conversion.preparation import Preparation, prepare
    from headwise.costs import formulas
    from headwise.costs.formulas import Comparison, Complexity, Inspection, compare, complexity, inspect
    from headwise.errors import (
        ArgumentError,
        CheckpointError,
        HeadwiseError,
        MissingExtraError,
        SpecError,
        StorageError,
    )
    from headwise.measure.evaluation import (
        ChoiceEvaluation,
        Evaluation,
        PlantedEvaluation,
        RetrievalEvaluation,
        RulerEvaluation,
        evaluate,
        evaluate_choices,
        evaluate_planted,
        evaluate_retrieval,
        evaluate_ruler,
    )
    from headwise.measure.texts import Sample, sample
    from headwise.measure.timing import doctor
    from headwise.models.specs import (
        ExpertLatentSpec,
        GroupedSpec,
        LatentSpaceSpec,
        LatentSpec,
        ModelSpec,
        RopeSpec,
    )
    from headwise.runtime.attention import (
        AttentionCache,
        ExpertLatentAttention,
        GroupedQueryAttention,
        LatentSpaceAttention,
        MultiHeadAttention,
        MultiHeadLatentAttention,
        MultiQueryAttention,
        RotaryEmbedding,
        SelfAttention,
    )
    from headwise.runtime.hf import Generation, generate, load, optimize
    from headwise.runtime.kernels import attend, attend_with_weights, choose_backend
    from headwise.serving.engines import evaluate_in_engine
    from headwise.serving.serve import serve
    from headwise.study.counting import Count, LayerCounts, count, count_layer

    cost = formulas

__all__ = [
    "ArgumentError",
    "AttentionCache",
    "CalibrateOptions",
    "Calibration",
    "CheckpointError",
    "ChoiceEvaluation",
    "ChoiceOptions",
    "Comparison",
    "Complexity",
    "Conversion",
    "ConvertOptions",
    "Count",
    "EngineOptions",
    "EvaluateOptions",
    "Evaluation",
    "ExpertLatentAttention",
    "ExpertLatentSpec",
    "Frontier",
    "FrontierOptions",
    "Generation",
    "GroupedQueryAttention",
    "GroupedSpec",
    "HeadwiseError",
    "HealOptions",
    "Healing",
    "Inspection",
    "LatentSpaceAttention",
    "LatentSpaceSpec",
    "LatentSpec",
    "LayerCounts",
    "MigrateOptions",
    "Migration",
    "MissingExtraError",
    "ModelSpec",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "PlantedEvaluation",
    "PlantedOptions",
    "Preparation",
    "PrepareOptions",
    "QuickFrontier",
    "QuickFrontierOptions",
    "RetrievalEvaluation",
    "RetrievalOptions",
    "RopeSpec",
    "RotaryEmbedding",
    "RulerEvaluation",
    "RulerOptions",
    "Sample",
    "SampleOptions",
    "SelfAttention",
    "SpecError",
    "StorageError",
    "Verification",
    "attend",
    "attend_with_weights",
    "calibrate",
    "choose_backend",
    "compare",
    "complexity",
    "convert",
    "count",
    "count_layer",
    "doctor",
    "evaluate",
    "evaluate_choices",
    "evaluate_in_engine",
    "evaluate_planted",
    "evaluate_retrieval",
    "evaluate_ruler",
    "frontier",
    "generate",
    "heal",
    "inspect",
    "load",
    "migrate",
    "optimize",
    "prepare",
    "quick_frontier",
    "sample",
    "serve",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "cost":  # a package whose functions are called as headwise.cost.…
        return importlib.import_module("headwise.costs.formulas")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
