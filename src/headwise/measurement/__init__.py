"""Times, memory, and the machine's limits."""

from headwise.measurement.layer_latency import LayerTimes, filled_cache, measure_comparison, measure_layers
from headwise.measurement.machine import Health, doctor
from headwise.measurement.memory import available_bytes, cache_nbytes, peak_rss_bytes
from headwise.measurement.timing import matmul_flops_per_second, time_interleaved
from headwise.renamed import moved_names, moved_to

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

__getattr__ = moved_names(
    __name__,
    moved_to("headwise.counting", "Count", "LayerCounts", "PeerCount", "count", "count_layer", "peer_counts"),
)
