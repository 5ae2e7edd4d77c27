"""The options of a conversion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EVALUATION_WINDOWS = 2
"""Of each text, unless more are asked for: enough to see a failed conversion by, in seconds."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What a user decides about a conversion; see `headwise.convert`."""

    to: str
    kv_budget: float | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    calibrate: str | Path | Sequence[str | Path] | None = None
    calibration_tokens: int | None = None
    calibration_window: int | None = None
    statistics: str | Path | None = None
    method: str | None = None
    without: Collection[str] = ()
    dtype: str | None = None
    format: Literal["headwise", "deepseek"] = "headwise"
    evaluate: bool | str | Path | Sequence[str | Path] = True
    evaluation_windows: int = EVALUATION_WINDOWS
    dry_run: bool = False
    overwrite: bool = False
