"""Small random models in folders, and conversions of them, for campaigns that run a model many thousand times."""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.real_models import save_tiny

import headwise

VOCABULARY = 97
WINDOW = 24
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    },
}
"""Sizes of each source, besides `tests.real_models.tiny_model`'s."""
CODED: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("llama", {"to": "mla", "kv_lora_rank": 48, "qk_rope_head_dim": 32, "bits": 4}),
    "heads": ("llama", {"to": "same", "bits": 4}),
    "latents-in-windows": ("mistral", {"to": "mla", "kv_lora_rank": 48, "qk_rope_head_dim": 32, "bits": 3}),
    "heads-in-windows": ("gemma3_text", {"to": "same", "bits": 3}),
}
"""Conversions whose cache is in codes: their sources and targets."""
TEXT = "the quick brown fox jumps over the lazy dog, and then it does so again. " * 40


def save_toy(folder: Path, name: str) -> Path:
    """One of `SOURCES`, or of `CODED` with its source beside it; a folder that is there already stays as it is."""
    if (folder / name).exists():
        return folder / name
    if name in SOURCES:
        sizes = {"head_dim": 64, "max_position_embeddings": 4096} if name != "deepseek_v3" else {}
        return save_tiny(folder / name, name, **sizes, **SOURCES[name])
    source, target = CODED[name]
    return convert_toy(save_toy(folder, source), folder / name, **target)


def convert_toy(source: Path, folder: Path, **target: Any) -> Path:
    """A conversion of such a model, calibrated on a text beside it."""
    text = source / "text.txt"
    text.write_text(TEXT)
    sizes = {"calibration_tokens": 1024, "calibration_window": 64}
    headwise.convert(source, folder, **target, **sizes, calibrate=text, evaluate=False)
    return folder


def resident() -> float:
    """Memory of this process, MiB, without what is free but kept for later by the allocator of many threads."""
    with suppress(OSError, AttributeError):  # of other systems' C libraries
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def growth(mib: Sequence[float]) -> float:
    """By how much memory grew once a process was warm: the median of the last tenth less that of the second."""
    tenth = max(len(mib) // 10, 1)
    return round(statistics.median(mib[-tenth:]) - statistics.median(mib[tenth : 2 * tenth] or mib), 1)
