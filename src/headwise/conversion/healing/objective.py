"""What healing minimises, on the logits of a model and of its teacher, which may be kept on disk.

A teacher's likeliest tokens may lie on disk, so that the teacher need not stay in memory.

Shapes: N positions, W tokens in a window, V tokens in the vocabulary, k of them kept of each position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.base.disk import storage_errors, write_whole
from headwise.base.progress import Progress
from headwise.conversion.calibration.windows import CalibrationWindows

STORING = "storing the teacher"
"""The name of the stage, for progress."""

_TEACHER_ROWS = 256


def bytes_per_token(count: int) -> int:
    """The bytes on disk a token of a text: ids and log-probabilities of ``count`` tokens, and one for others."""
    return count * (4 + 2) + 4


class StoredTeacher:
    """The likeliest tokens of a teacher after each token of some windows, one file for each window.

    Args:
        folder: the folder of the files; what an earlier run has stored there is used.
        count: the number k of tokens that are kept at each position.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count

    def store(self, teacher: Any, windows: Iterable[CalibrationWindows], total: int, progress: Progress) -> None:
        """Run the teacher on windows ``[1, W]`` that are not stored yet.

        Args:
            teacher: the function that is called with one window and returns logits ``[W, V]``.
            windows: the windows ``[1, W]`` of the run, which may repeat.
            total: the number of the windows, for progress.
            progress: the callback that is told of each window.

        Raises:
            StorageError: the disk is full, or a file cannot be written.
        """
        with storage_errors("teacher", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        for number, window in enumerate(windows):
            progress(STORING, number, total)
            file = self._file(window)
            if self._read(file) is not None:
                continue
            logits: Tensor = teacher(window)
            found = [_top(piece, self._count) for piece in torch.split(logits, _TEACHER_ROWS)]
            tokens, log_probs, rest = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
            kept = {"tokens": tokens.to(torch.int32), "log_probs": log_probs.to(torch.float16), "log_rest": rest}
            content = save(kept)
            with storage_errors("teacher", self._folder):
                write_whole(file, content)
        progress(STORING, total, total)

    def top(self, windows: CalibrationWindows) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of B windows one after another, and logarithms of probabilities, float32.

        The token ids are int64 ``[B·W, k]``, their logarithms ``[B·W, k]``, and that of all other tokens together
        ``[B·W, 1]``.
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


_ROWS = 256
"""The number of positions whose distributions are in memory at once on a GPU: those of a window take gigabytes."""

_NUMBERS = 1 << 19
"""The number of logits in such a piece for each thread of a CPU, few enough to stay in its caches while they are read
again."""


def divergence(logits: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """The mean divergence of a model's distribution from its teacher's, KL(teacher ‖ model), in nats.

    Both are softened by the temperature, and the divergence is multiplied by its square, so that its gradient keeps
    its size (Hinton et al., 2015). For example ``divergence(model(ids).logits[0], teacher(ids).logits[0])``.

    Args:
        logits: the logits of the model, ``[N, V]``.
        teacher: the logits of the teacher, ``[N, V]``; no gradient is computed for them.
        temperature: the temperature, above 0.
    """
    return _Divergence.apply(logits, teacher, temperature)  # type: ignore[no-any-return, no-untyped-call]


def divergence_from_top(logits: Tensor, tokens: Tensor, log_probs: Tensor, log_rest: Tensor) -> Tensor:
    """The mean divergence from a teacher of which only the likeliest tokens are known, in nats.

    All other tokens count as one, so that it is a lower bound of `divergence` at temperature 1. For example
    ``divergence_from_top(model(ids).logits[0], *stored.top(window))``.

    Args:
        logits: the logits of the model, ``[N, V]``.
        tokens: the teacher's likeliest tokens, int64 ``[N, k]``.
        log_probs: the teacher's logarithms of their probabilities, ``[N, k]``.
        log_rest: the logarithm of the probability of all others together, ``[N, 1]``; −infinity where there are none.
    """
    return _FromTop.apply(logits, tokens, log_probs, log_rest)  # type: ignore[no-any-return, no-untyped-call]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cost of the text's own tokens, in nats.

    For example ``cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])``.

    Args:
        logits: the logits of the model, ``[N, V]``.
        targets: the tokens that follow in the text, int64 ``[N]``.
    """
    return F.cross_entropy(logits.float(), targets)


def hidden_error(states: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """The mean over layers of the squared error of a layer's output, as a part of its variance in the teacher.

    For example ``hidden_error(model(ids, output_hidden_states=True).hidden_states, others)``.

    Args:
        states: the outputs of the model's layers, one tensor ``[..., E]`` each.
        teacher: the outputs of the teacher's layers, in the same shapes.
    """
    errors = []
    for own, other in zip(states, teacher, strict=True):
        wanted = other.float()
        errors.append((own.float() - wanted).square().mean() / wanted.var().clamp_min(1e-12))
    return torch.stack(errors).mean()


class _WithGradient(torch.autograd.Function):
    """A loss and its gradient, computed some positions at a time: autograd would keep all distributions."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


class _Divergence(_WithGradient):
    """KL of all of the teacher's distribution."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        count = len(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for piece in _pieces(logits):
            own, other = (one[piece].to(wide) for one in (logits, teacher))
            if temperature != 1:
                own, other = own / temperature, other / temperature
            own, other = F.log_softmax(own, -1), F.log_softmax(other, -1)
            weights = other.exp()
            total += (weights * other.sub_(own)).sum().double()
            gradient[piece] = own.exp_().sub_(weights).mul_(temperature / count)
        ctx.save_for_backward(gradient)
        return (total * temperature**2 / count).to(wide)


class _FromTop(_WithGradient):
    """KL of the likeliest tokens; the gradient of a token that is not listed is its share of the others'."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, log_probs: Tensor, log_rest: Tensor) -> Tensor:
        count = len(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for piece in _pieces(logits):
            listed, rest = tokens[piece], log_rest[piece].to(wide)
            known = torch.log_softmax(torch.cat((log_probs[piece].to(wide), rest), -1), -1)  # kept ones are rounded
            weights = known.exp()
            own = F.log_softmax(logits[piece].to(wide), -1)
            # Summed over the others: one less the listed ones would be rounding where these are nearly all.
            own_rest = torch.logsumexp(own.scatter(-1, listed, -torch.inf), -1, keepdim=True)
            mine = torch.cat((own.gather(-1, listed), own_rest), -1)
            total += torch.where(weights > 0, weights * (known - mine), 0).sum().double()
            of_rest = own.exp() - weights[:, -1:] * (own - own_rest).exp()
            of_listed = own.gather(-1, listed).exp() - weights[:, :-1]
            gradient[piece] = of_rest.scatter(-1, listed, of_listed) / count
        ctx.save_for_backward(gradient)
        return (total / count).to(wide)


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Slices of positions, all of them in order."""
    numbers = _NUMBERS * torch.get_num_threads()
    rows = max(numbers // logits.shape[1], 1) if logits.device.type == "cpu" else _ROWS
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
