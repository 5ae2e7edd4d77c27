"""Times, memory, and the machine's limits."""

from headwise.measure.timing.layer_latency import LayerTimes, filled_cache, measure_comparison, measure_layers
from headwise.measure.timing.machine import Health, doctor
from headwise.measure.timing.memory import available_bytes, cache_nbytes, peak_rss_bytes
from headwise.measure.timing.timing import matmul_flops_per_second, time_interleaved

__all__ = [
    "Health",
    "LayerTimes",
    "available_bytes",
    "cache_nbytes",
    "doctor",
    "filled_cache",
    "matmul_flops_per_second",
    "measure_comparison",
    "measure_layers",
    "peak_rss_bytes",
    "time_interleaved",
]
