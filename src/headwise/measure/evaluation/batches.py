"""Texts of several lengths, put together in batches that change nothing for any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headwise.runtime.caches.frequencies import changes_at


def batches(model: Any, lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Put texts of like lengths together, the longest first.

    For example ``list(batches(model, [3, 8, 4], tokens=8))`` is ``[[1], [2, 0]]``.

    Where rotary frequencies depend on the longest text of a batch, all but the usual ones suit texts of one length.

    Args:
        model: a transformers model that reads the texts.
        lengths: of each text, in tokens.
        tokens: the most in a batch of several texts, padding included.

    Yields:
        The numbers of the texts in a batch, with the longest first.
    """
    usual = changes_at(model)
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    done = 0
    while done < len(order):
        longest = lengths[order[done]]
        batch = order[done : done + max(1, tokens // max(longest, 1))]
        if usual is not None and longest > usual:
            batch = [number for number in batch if lengths[number] == longest]
        yield batch
        done += len(batch)
