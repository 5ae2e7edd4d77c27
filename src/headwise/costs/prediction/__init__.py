"""Predicted time and memory of a model on a device: its operators against the device's dense peaks. No torch here."""

from headwise.costs.prediction.curves import MANY, Curves, Grid, Sizes, curves_of, to_table
from headwise.costs.prediction.engine_cache import SAFE_LOSS, EngineCache, cached_heads
from headwise.costs.prediction.engines import (
    GGML_TYPES,
    OLLAMA,
    RUNNABLE,
    SERVING_ENGINES,
    ServingEngine,
    cache_of,
    caches_of_bits,
    check_engine,
    engine_caches,
    named_caches,
)
from headwise.costs.prediction.hardware import Device, device, devices
from headwise.costs.prediction.memory import (
    ALLOCATING_ENGINES,
    Memory,
    allocation,
    largest_batch,
    longest_context,
    peak_memory,
)
from headwise.costs.prediction.operators import (
    MOST,
    Efficiency,
    Operator,
    Pass,
    Timed,
    fastest_absorbed,
    most_absorbed,
    operators,
    seconds,
)
from headwise.costs.prediction.predict import Prediction, counted_in, predict
