"""Evaluation's numbers computed in the simplest way."""

from __future__ import annotations

from typing import Any

import torch


def scores_by_hand(model: Any, prompt: list[int], ending: list[int]) -> float:
    """The log-likelihood of an ending, a token at a time and without any batch."""
    ids, total = list(prompt), 0.0
    with torch.inference_mode():
        for token in ending:
            logits = model(torch.tensor([ids])).logits[0, -1]
            total += float(logits.double().log_softmax(-1)[token])
            ids.append(token)
    return total
