"""headwise: choose, convert, run and prove attention.

The public names below are loaded when first used, so that a question about a config never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ArgumentError": "headwise.errors",
    "AttentionCache": "headwise.attention",
    "CalibrateOptions": "headwise.options",
    "Calibration": "headwise.conversion",
    "CheckpointError": "headwise.errors",
    "ChoiceEvaluation": "headwise.evaluation",
    "ChoiceOptions": "headwise.options",
    "Comparison": "headwise.cost",
    "Complexity": "headwise.cost",
    "Conversion": "headwise.conversion",
    "ConvertOptions": "headwise.options",
    "Count": "headwise.counting",
    "EngineOptions": "headwise.options",
    "EvaluateOptions": "headwise.options",
    "Evaluation": "headwise.evaluation",
    "ExpertLatentAttention": "headwise.attention",
    "ExpertLatentSpec": "headwise.specs",
    "Frontier": "headwise.frontiers",
    "FrontierOptions": "headwise.options",
    "Generation": "headwise.hf",
    "GroupedQueryAttention": "headwise.attention",
    "GroupedSpec": "headwise.specs",
    "HeadwiseError": "headwise.errors",
    "HealOptions": "headwise.options",
    "Healing": "headwise.healing",
    "Inspection": "headwise.cost",
    "LatentSpaceAttention": "headwise.attention",
    "LatentSpaceSpec": "headwise.specs",
    "LatentSpec": "headwise.specs",
    "LayerCounts": "headwise.counting",
    "MissingExtraError": "headwise.errors",
    "MigrateOptions": "headwise.options",
    "Migration": "headwise.migration",
    "ModelSpec": "headwise.specs",
    "MultiHeadAttention": "headwise.attention",
    "MultiHeadLatentAttention": "headwise.attention",
    "MultiQueryAttention": "headwise.attention",
    "PlantedEvaluation": "headwise.evaluation",
    "PlantedOptions": "headwise.options",
    "Preparation": "headwise.preparation",
    "PrepareOptions": "headwise.options",
    "QuickFrontier": "headwise.frontiers",
    "QuickFrontierOptions": "headwise.options",
    "RetrievalEvaluation": "headwise.evaluation",
    "RetrievalOptions": "headwise.options",
    "RopeSpec": "headwise.specs",
    "RotaryEmbedding": "headwise.attention",
    "Sample": "headwise.texts",
    "SampleOptions": "headwise.options",
    "SelfAttention": "headwise.attention",
    "SpecError": "headwise.errors",
    "StorageError": "headwise.errors",
    "attend": "headwise.kernels",
    "attend_with_weights": "headwise.kernels",
    "calibrate": "headwise.conversion",
    "choose_backend": "headwise.kernels",
    "compare": "headwise.cost",
    "complexity": "headwise.cost",
    "convert": "headwise.conversion",
    "count": "headwise.counting",
    "count_layer": "headwise.counting",
    "doctor": "headwise.measurement",
    "evaluate": "headwise.evaluation",
    "evaluate_choices": "headwise.evaluation",
    "evaluate_in_engine": "headwise.engines",
    "evaluate_planted": "headwise.evaluation",
    "evaluate_retrieval": "headwise.evaluation",
    "frontier": "headwise.frontiers",
    "generate": "headwise.hf",
    "heal": "headwise.healing",
    "inspect": "headwise.cost",
    "load": "headwise.hf",
    "migrate": "headwise.migration",
    "optimize": "headwise.hf",
    "quick_frontier": "headwise.frontiers",
    "sample": "headwise.texts",
    "prepare": "headwise.preparation",
}

if TYPE_CHECKING:
    from headwise.attention import (
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
    from headwise.conversion import Calibration, Conversion, calibrate, convert
    from headwise.cost import Comparison, Complexity, Inspection, compare, complexity, inspect
    from headwise.counting import Count, LayerCounts, count, count_layer
    from headwise.engines import evaluate_in_engine
    from headwise.errors import (
        ArgumentError,
        CheckpointError,
        HeadwiseError,
        MissingExtraError,
        SpecError,
        StorageError,
    )
    from headwise.evaluation import (
        ChoiceEvaluation,
        Evaluation,
        PlantedEvaluation,
        RetrievalEvaluation,
        evaluate,
        evaluate_choices,
        evaluate_planted,
        evaluate_retrieval,
    )
    from headwise.frontiers import Frontier, QuickFrontier, frontier, quick_frontier
    from headwise.healing import Healing, heal
    from headwise.hf import Generation, generate, load, optimize
    from headwise.kernels import attend, attend_with_weights, choose_backend
    from headwise.measurement import doctor
    from headwise.migration import Migration, migrate
    from headwise.options import (
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
        SampleOptions,
    )
    from headwise.preparation import Preparation, prepare
    from headwise.specs import (
        ExpertLatentSpec,
        GroupedSpec,
        LatentSpaceSpec,
        LatentSpec,
        ModelSpec,
        RopeSpec,
    )
    from headwise.texts import Sample, sample

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
    "Sample",
    "SampleOptions",
    "SelfAttention",
    "SpecError",
    "StorageError",
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
]


def __getattr__(name: str) -> Any:
    if name == "cost":  # a package whose functions are called as headwise.cost.…
        return importlib.import_module("headwise.cost")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
