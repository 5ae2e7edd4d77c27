"""Predicted time and memory of a model on a device: its operators against the device's dense peaks. No torch here."""

from headwise.costs.prediction.allocation import ENGINES, Allocation, allocation
from headwise.costs.prediction.crossover import fastest_absorbed, most_absorbed
from headwise.costs.prediction.curves import MANY, Curves, Grid, Kind, Sizes, curves_of, pairs, to_table
from headwise.costs.prediction.engine_caches import (
    SAFE_LOSS,
    SERVING_ENGINES,
    EngineCache,
    ServingEngine,
    cache_of,
    caches_of_bits,
    check_engine,
    engine_caches,
    named_caches,
)
from headwise.costs.prediction.hardware import Device, device, devices
from headwise.costs.prediction.memory import Memory, largest_batch, longest_context, peak_memory
from headwise.costs.prediction.operators import MOST, Operator, Pass, operators
from headwise.costs.prediction.predict import Prediction, counted_in, predict
from headwise.costs.prediction.roofline import Efficiency, Timed, merged, seconds
from headwise.costs.prediction.work import LayerWork, ModelWork, Reach, Work, model_work

__all__ = [
    "ENGINES",
    "MANY",
    "MOST",
    "SAFE_LOSS",
    "SERVING_ENGINES",
    "Allocation",
    "Curves",
    "Device",
    "Efficiency",
    "EngineCache",
    "Grid",
    "Kind",
    "LayerWork",
    "Memory",
    "ModelWork",
    "Operator",
    "Pass",
    "Prediction",
    "Reach",
    "ServingEngine",
    "Sizes",
    "Timed",
    "Work",
    "allocation",
    "cache_of",
    "caches_of_bits",
    "check_engine",
    "counted_in",
    "curves_of",
    "device",
    "devices",
    "engine_caches",
    "fastest_absorbed",
    "largest_batch",
    "longest_context",
    "merged",
    "model_work",
    "most_absorbed",
    "named_caches",
    "operators",
    "pairs",
    "peak_memory",
    "predict",
    "seconds",
    "to_table",
]
