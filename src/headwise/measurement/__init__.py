"""Timing, memory, and the machine's own limits."""

from headwise.measurement.counting import Count, cache_nbytes, count
from headwise.measurement.layer import LayerTimes, measure_comparison, measure_layers
from headwise.measurement.memory import peak_rss_bytes
from headwise.measurement.timing import matmul_flops_per_second, time_interleaved

__all__ = [
    "Count",
    "LayerTimes",
    "cache_nbytes",
    "count",
    "matmul_flops_per_second",
    "measure_comparison",
    "measure_layers",
    "peak_rss_bytes",
    "time_interleaved",
]
