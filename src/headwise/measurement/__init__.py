"""Timing, memory, and the machine's own limits."""

from headwise.measurement.counters import LayerCounts, count_layer
from headwise.measurement.counting import Count, cache_nbytes, count
from headwise.measurement.layer import LayerTimes, filled_cache, measure_comparison, measure_layers
from headwise.measurement.machine import Health, doctor
from headwise.measurement.memory import available_bytes, peak_rss_bytes
from headwise.measurement.peers import PeerCount, peer_counts
from headwise.measurement.timing import matmul_flops_per_second, time_interleaved

__all__ = [
    "Count",
    "Health",
    "LayerCounts",
    "LayerTimes",
    "PeerCount",
    "available_bytes",
    "cache_nbytes",
    "count",
    "count_layer",
    "doctor",
    "filled_cache",
    "matmul_flops_per_second",
    "measure_comparison",
    "measure_layers",
    "peak_rss_bytes",
    "peer_counts",
    "time_interleaved",
]
