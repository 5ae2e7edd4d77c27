"""What a result is as a JSON document."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same, with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
