"""Tokenise text, and cut it into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.base.options import at_least
from headwise.errors import ArgumentError, SpecError
from headwise.models.checkpoints import tokenize


def token_windows(
    tokenizer: Any, text: str, *, window: int, windows: int | None = None, name: str = "text"
) -> Tensor:
    """Tokenise a text into consecutive windows ``[windows, window]`` without overlap.

    Each begins as the tokenizer begins a text, with a BOS token or without; other special tokens are not added. For
    example ``token_windows(tokenizer, read_text("text.txt"), window=512)``.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text to tokenise; a last part shorter than a window is left out.
        window: the number of tokens in each window, special tokens included.
        windows: the most windows; all when None.
        name: the name of the text in errors.

    Raises:
        ArgumentError: window or windows is not positive, or the text is shorter than one window.
    """
    begin = first_ids(tokenizer)
    if window < 2 + len(begin):
        raise ArgumentError("window", window, f"must be at least {2 + len(begin)} tokens")
    at_least(1).check("windows", windows)
    ids = token_ids(tokenizer, text, at_most=None if windows is None else window * windows)
    shorter = f"--window {len(ids) + len(begin)}" if len(ids) > 1 else "a smaller window"
    cut = cut_windows(ids, window=window - len(begin), windows=windows, name=name, shorter=shorter)
    return put_begin_before(cut, begin)


def token_ids(tokenizer: Any, text: str, *, at_most: int | None = None) -> list[int]:
    """Tokenise a text, adding no special tokens.

    For example ``token_ids(tokenizer, "Once upon a time")``.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text to tokenise.
        at_most: the number of tokens that is enough, so that only the beginning of a long text is read; all when
            None.
    """
    # No tokenizer in use averages over 16 characters a token for long.
    beginning = text if at_most is None else text[: at_most * 32]
    ids: list[int] = tokenize(tokenizer, beginning, add_special_tokens=False)["input_ids"]
    return ids


def cut_windows(
    ids: list[int], *, window: int, windows: int | None = None, name: str = "text", shorter: str = "a smaller window"
) -> Tensor:
    """Cut token ids into windows ``[windows, window]``; see `token_windows`.

    For example ``cut_windows([1, 2, 3, 4, 5], window=2).tolist()`` is ``[[1, 2], [3, 4]]``.

    Args:
        ids: the token ids of the text.
        window: tokens in each window.
        windows: the most windows; all when None.
        name: the name of the text in errors.
        shorter: the advice that an error gives besides a longer text.

    Raises:
        ArgumentError: there are fewer ids than in one window.
    """
    if len(ids) < window:
        raise ArgumentError(
            name, f"{len(ids)} tokens", f"must be at least one window of {window} tokens; a longer text, or {shorter}"
        )
    count = len(ids) // window if windows is None else min(windows, len(ids) // window)
    return torch.tensor(ids[: count * window]).view(count, window)


def put_begin_before(windows: Tensor, begin: Sequence[int]) -> Tensor:
    """Windows ``[n, W]`` of a text, each behind the tokens that begin a text.

    For example ``put_begin_before(torch.tensor([[5, 6], [7, 8]]), [1]).tolist()`` is ``[[1, 5, 6], [1, 7, 8]]``.

    Args:
        windows: token ids of the text in each window, ``[n, W]``.
        begin: the tokens that begin a text, see `first_ids`.
    """
    return torch.cat((torch.tensor(begin, dtype=windows.dtype).expand(len(windows), -1), windows), 1)


def default_window(positions: int | None, most: int, *, around: int = 0) -> int:
    """The default number of a text's tokens in a window: ``most``, or the model's positions if these are fewer.

    For example ``default_window(512, 2048)`` is 512.

    Args:
        positions: the number of the model's positions; None if it has no limit.
        most: the most tokens in a window, those around the text included.
        around: the number of tokens that the tokenizer puts around a text.

    Raises:
        SpecError: the model has no room for two tokens of text.
    """
    if positions is not None and positions < 2 + around:
        raise SpecError("max_position_embeddings", positions, f"must be at least {2 + around} for a text to be read")
    return min(most, positions or most) - around


def first_ids(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before any text, such as a BOS token; empty if it puts none.

    For example ``first_ids(tokenizer)``.
    """
    return wrapping_ids(tokenizer)[0]


def wrapping_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after any text: an encoder's ``[CLS]`` and ``[SEP]``.

    For example ``wrapping_ids(tokenizer)``.
    """
    alone = token_ids(tokenizer, "a")
    whole: list[int] = tokenize(tokenizer, "a")["input_ids"]
    for at in range(len(whole) - len(alone) + 1):
        if alone and whole[at : at + len(alone)] == alone:
            return whole[:at], whole[at + len(alone) :]
    return [], []


def ending_ids(tokenizer: Any, prompt: str, ending: str) -> tuple[list[int], list[int]]:
    """Tokenise a prompt and its ending as one text, and split them; a token that spans both is the ending's.

    For example ``ending_ids(tokenizer, "The sky is", " blue.")``.
    """
    alone = token_ids(tokenizer, prompt)
    whole = token_ids(tokenizer, prompt + ending)
    shared = 0
    while shared < min(len(alone), len(whole)) and alone[shared] == whole[shared]:
        shared += 1
    return whole[:shared], whole[shared:]
