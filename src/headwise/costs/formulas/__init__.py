"""Exact costs of attention as closed forms over specs: parameters, FLOPs, cache, activations. No torch here."""

from headwise.costs.formulas import model
from headwise.costs.formulas.comparison import Comparison, Row, compare, ladder, matched
from headwise.costs.formulas.layer import (
    DTYPE_BYTES,
    activation_bytes,
    backward_flops,
    cache_bytes,
    cache_bytes_per_token,
    cache_values,
    decode_flops,
    decode_intensity,
    dtype_bytes,
    formulas,
    forward_flops,
    parameters,
    prefill_flops,
    shard,
    stages,
    state_bytes,
    thop_count,
)
from headwise.costs.formulas.reports import Complexity, Inspection, complexity, inspect
from headwise.costs.formulas.stages import KERNELS, attended_pairs
