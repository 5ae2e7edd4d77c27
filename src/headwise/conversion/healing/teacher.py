"""A teacher's likeliest tokens on disk, so that the teacher need not stay in memory.

Shapes: W tokens in a window, k kept of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.base.disk import clearly, write_whole
from headwise.base.progress import Progress
from headwise.conversion.calibration.windows import CalibrationWindows

STORING = "storing the teacher"
"""The name of the stage, for progress."""

_ROWS = 256


def bytes_per_token(count: int) -> int:
    """The bytes that so many tokens take for each token of a text: numbers, logarithms, and one of all others."""
    return count * (4 + 2) + 4


class StoredTeacher:
    """The likeliest tokens of a teacher after each token of some windows, one file for each window.

    Args:
        folder: of the files; what an earlier run has stored there is used.
        count: k.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count

    def store(self, teacher: Any, windows: Iterable[CalibrationWindows], total: int, progress: Progress) -> None:
        """Run the teacher on windows ``[1, W]`` that are not stored yet.

        Args:
            teacher: called with one window; returns logits ``[W, V]``.
            windows: which may repeat.
            total: their number, for progress.
            progress: told of each.

        Raises:
            StorageError: the disk is full, or a file cannot be written.
        """
        with clearly("teacher", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        for number, window in enumerate(windows):
            progress(STORING, number, total)
            file = self._file(window)
            if self._read(file) is not None:
                continue
            logits: Tensor = teacher(window)
            found = [_top(piece, self._count) for piece in torch.split(logits, _ROWS)]
            tokens, log_probs, rest = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
            kept = {"tokens": tokens.to(torch.int32), "log_probs": log_probs.to(torch.float16), "log_rest": rest}
            content = save(kept)
            with clearly("teacher", self._folder):
                write_whole(file, content)
        progress(STORING, total, total)

    def top(self, windows: CalibrationWindows) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of B windows one after another, and logarithms of probabilities, float32.

        These are int64 ``[B·W, k]``; ``[B·W, k]`` of the tokens; and ``[B·W, 1]`` of all others together.
        """
        stored = [self._read(self._file(windows[row : row + 1])) for row in range(len(windows))]
        tokens, log_probs, rest = (
            torch.cat([one[name] for one in stored if one is not None])
            for name in ("tokens", "log_probs", "log_rest")
        )
        return tokens.long(), log_probs.float(), rest

    def _file(self, window: CalibrationWindows) -> Path:
        content = window.ids.cpu().numpy().tobytes() + window.positions.cpu().numpy().tobytes()
        return self._folder / f"{hashlib.sha256(content).hexdigest()[:32]}.safetensors"

    def _read(self, file: Path) -> dict[str, Tensor] | None:
        try:
            tensors: dict[str, Tensor] = load(file.read_bytes())
        except (OSError, SafetensorError):
            return None
        return tensors if tensors.get("tokens", torch.empty(0, 0)).shape[-1] == self._count else None


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` likeliest tokens of logits ``[N, V]``, and logarithms of probabilities as `top` returns them."""
    log_probs = logits.float().log_softmax(-1)
    values, tokens = log_probs.topk(count, dim=-1)
    return tokens, values, torch.logsumexp(log_probs.scatter(-1, tokens, -torch.inf), -1, keepdim=True)
