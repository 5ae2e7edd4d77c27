"""What a worker is told on its command line, and what it answers; standard library and NumPy alone.

A worker runs in an environment of its own, where the engine is installed and headwise may not be.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def request() -> dict[str, Any]:
    """``model``, ``ids``, ``prompt``, ``new``, ``dtype``, ``stored`` and ``log_probs``, the answer's file.

    ``stored`` is an engine's name of a quantised cache; None for a full one in the dtype.

    The argument is JSON, or ``@`` and the name of a file that holds it.
    """
    said = sys.argv[1]
    asked: dict[str, Any] = json.loads(Path(said[1:]).read_text() if said.startswith("@") else said)
    return asked


def prepare_vllm(room: int) -> None:
    """Set what vLLM reads when it is imported: ``room`` GiB of cache, in this process, which then sees it."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(room),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def answer(logits: Any, asked: dict[str, Any], **values: Any) -> None:
    """Save the log-probabilities ``[S, V]`` of logits, and print everything else as the last line."""
    numbers = np.asarray(logits, dtype=np.float64)
    numbers -= numbers.max(-1, keepdims=True)
    numbers -= np.log(np.exp(numbers).sum(-1, keepdims=True))
    np.save(Path(asked["log_probs"]), numbers.astype(np.float32))
    print(json.dumps(values), flush=True)


def answer_own(own: list[float], asked: dict[str, Any], **values: Any) -> None:
    """The same, of an engine that tells the log-probabilities ``[S - 1]`` of the given tokens alone."""
    np.save(Path(asked["log_probs"]), np.asarray(own, dtype=np.float32))
    print(json.dumps(values), flush=True)
