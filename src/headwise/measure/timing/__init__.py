"""Times of calls, memory of the process, and the machine's limits."""

from headwise.measure.timing.machine import Health, available_bytes, cache_nbytes, doctor, peak_rss_bytes
from headwise.measure.timing.timing import (
    LayerTimes,
    filled_cache,
    matmul_flops_per_second,
    measure_comparison,
    measure_layers,
    time_interleaved,
)
