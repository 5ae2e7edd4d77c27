"""What attention costs: closed forms over specs, exact. No torch here."""

from headwise.cost import model
from headwise.cost.compare import Comparison, Row, compare, ladder
from headwise.cost.inspection import Inspection, inspect
from headwise.cost.layer import (
    DTYPE_BYTES,
    cache_bytes,
    cache_bytes_per_token,
    decode_intensity,
    dtype_bytes,
    formulas,
    forward_flops,
    parameters,
    stages,
    state_bytes,
    thop_count,
)
from headwise.cost.stages import attended_pairs

__all__ = [
    "DTYPE_BYTES",
    "Comparison",
    "Inspection",
    "Row",
    "attended_pairs",
    "cache_bytes",
    "cache_bytes_per_token",
    "compare",
    "decode_intensity",
    "dtype_bytes",
    "formulas",
    "forward_flops",
    "inspect",
    "ladder",
    "model",
    "parameters",
    "stages",
    "state_bytes",
    "thop_count",
]
