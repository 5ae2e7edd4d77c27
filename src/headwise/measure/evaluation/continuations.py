"""Greedy continuations of a model beside its reference's: how long they are equal, and whether they part at a tie.

A server's user sees texts, not divergences. Both models continue the same prompts, each as it decodes when it is
served: one token at a time through its own cache. Two texts that part differ from there on, be the cause large or
a rounding between two tokens of equal likelihood; so the place is looked at where they part.

Shapes: B prompts of a batch, P tokens of a prompt, T tokens behind it, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headwise.base.processes import all_sum, my_windows
from headwise.base.progress import Progress, silent
from headwise.errors import ArgumentError
from headwise.measure.evaluation.model_pair import Pair
from headwise.measure.evaluation.scoring import greedy
from headwise.runtime.hf.generate import stop_tokens

PROMPT = 128
"""Tokens of a prompt, unless windows have fewer, or twice as many exceed the models' positions."""

TOKENS = 256
"""Tokens of a continuation, unless the models' positions end before."""

NEAR_TIE = 0.125
"""Nats between the reference's two likeliest tokens up to which they are nearly tied: the second is then at least
88 % as likely as the first. It is bfloat16's step between 16 and 32: rounding such logits alone may decide."""

_BATCH = 8
"""Prompts that are continued together, by dtypes whose rounding is too fine for a batch to change a token."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """One prompt, and where the two continuations of it part.

    Attributes:
        text: the file of the text.
        window: the number of the window that the prompt is cut from, from 0.
        start: the place of the prompt's text in the window.
        tokens: the number of tokens that the reference wrote: fewer than were asked for where it ended its text.
        equal: the number of tokens before the first that differs; ``tokens`` where none does.
        gap: the nats between the reference's two likeliest tokens at the place of that first one; None where all are
            equal.
    """

    text: str
    window: int
    start: int
    tokens: int
    equal: int
    gap: float | None


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """Greedy continuations of a model beside those of its reference.

    Attributes:
        prompts: the number of prompts, of all texts.
        prompt_tokens: P, the tokens of each.
        tokens: T, the most tokens of a continuation.
        equal: the number of prompts whose continuations are equal throughout.
        equal_share: the same as a fraction of all prompts.
        median_equal: the median number of tokens until the two part; those that never do count with all they have.
        near_ties: the number of prompts whose continuations part at a near tie: where the reference's two likeliest
            tokens are at most ``near_tie`` nats apart.
        near_tie: that threshold, `NEAR_TIE`.
        each: the prompts one by one.
        line: the result in words.
    """

    prompts: int
    prompt_tokens: int
    tokens: int
    equal: int
    equal_share: float
    median_equal: float
    near_ties: int
    near_tie: float
    each: tuple[Continuation, ...]
    line: str


@dataclass(frozen=True)
class Prompt:
    """Tokens that are continued.

    Attributes:
        text: the file of the text.
        window: the number of the window that the prompt is cut from, from 0.
        start: the place of the prompt's text in the window.
        ids: the prompt, ``[P]``.
    """

    text: str
    window: int
    start: int
    ids: Tensor


def cut_prompts(
    texts: Sequence[tuple[str, Tensor]], count: int, *, positions: int | None = None, begin: int = 0
) -> list[Prompt]:
    """Prompts from windows of text, evenly over all of each text and without overlap.

    For example ``len(cut_prompts([("text.txt", torch.zeros(2, 512, dtype=torch.long))], 8))`` is 8.

    Args:
        texts: the name of each text, and its windows ``[n, W]``.
        count: the number of prompts of each text.
        positions: the longest sequence that the models support; any when None.
        begin: the number of tokens that each window, and so each prompt, begins with by the tokenizer's rule.

    Raises:
        ArgumentError: a text has fewer prompts.
    """
    window = texts[0][1].shape[1]
    length = min(PROMPT, window) if positions is None else min(PROMPT, window, positions // 2)
    taken = length - begin  # of text
    each = (window - begin) // taken if taken > 0 else 0
    prompts = []
    for name, windows in texts:
        places = each * len(windows)
        if count > places:
            rule = f"must be at most {places}: {name} has no more prompts of {length} tokens in its windows"
            raise ArgumentError("continuations", count, rule)
        for number in range(count):
            index, place = divmod(number * places // count, each)
            start = begin + place * taken
            row = windows[index]
            prompts.append(Prompt(name, index, start, torch.cat((row[:begin], row[start : start + taken]))))
    return prompts


@torch.inference_mode()
def compare_continuations(
    pair: Pair, prompts: Sequence[Prompt], *, progress: Progress = silent, shared: bool = False
) -> Continuations:
    """Continue prompts greedily with a model and with its reference, and find where the two part.

    For example ``compare_continuations(open_pair("./mla", against="./model"), cut_prompts(texts, 8)).equal``.

    Each continues its own tokens, one at a time, through the cache that it has in its pair: codes, a format
    (`Pair.caching`) or its numbers. An end-of-text token of the reference's ends a comparison. In dtypes of fewer
    than 32 bits each prompt is continued by itself, because a batch rounds otherwise than a single sequence.

    Args:
        pair: the model and its reference.
        prompts: the prompts, of one length.
        progress: the callback that reports each batch.
        shared: whether each of several processes continues its share of the prompts; all of them have to call this.

    Raises:
        CheckpointError: a model computes NaN or infinite logits.
    """
    length = len(prompts[0].ids)
    tokens = TOKENS if pair.positions is None else min(TOKENS, pair.positions - length)
    rows = _BATCH if pair.dtype.itemsize >= torch.float32.itemsize else 1
    batches = [range(first, min(first + rows, len(prompts))) for first in range(0, len(prompts), rows)]
    mine = my_windows(len(batches)) if shared else range(len(batches))
    found = torch.zeros(len(prompts), 3, dtype=torch.float64)
    for done, number in enumerate(mine):
        progress("continuations", done, len(mine))
        batch = batches[number]
        ids = torch.stack([prompts[index].ids for index in batch]).to(pair.device)
        found[batch.start : batch.stop] = _compare(pair, ids, tokens)
    progress("continuations", len(mine), len(mine))
    found = all_sum(found) if shared else found
    each = tuple(
        Continuation(
            text=prompt.text,
            window=prompt.window,
            start=prompt.start,
            tokens=int(written),
            equal=int(equal),
            gap=gap if equal < written else None,
        )
        for prompt, (written, equal, gap) in zip(prompts, found.tolist(), strict=True)
    )
    return summary(each, prompt_tokens=length, tokens=tokens)


def summary(each: tuple[Continuation, ...], *, prompt_tokens: int, tokens: int) -> Continuations:
    """The shares and the median over prompts; see `Continuations`.

    For example ``summary((Continuation(text="a", window=0, start=0, tokens=9, equal=9, gap=None),), prompt_tokens=4,
    tokens=9).equal`` is 1.
    """
    gaps = [one.gap for one in each if one.gap is not None]
    equal, near_ties = len(each) - len(gaps), sum(gap <= NEAR_TIE for gap in gaps)
    middle = float(median(one.equal for one in each))
    ties = f" · {near_ties} of {len(gaps)} part at a near tie" if gaps else ""
    return Continuations(
        prompts=len(each),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        equal=equal,
        equal_share=equal / len(each),
        median_equal=middle,
        near_ties=near_ties,
        near_tie=NEAR_TIE,
        each=each,
        line=f"{equal} of {len(each)} continuations of {tokens} tokens equal · median {middle:g} equal tokens{ties}",
    )


def _compare(pair: Pair, ids: Tensor, tokens: int) -> Tensor:
    """For prompts ``[B, P]``: the tokens that the reference writes, how many are equal, its gap there, ``[B, 3]``."""
    reference, model = pair.models["against"], pair.models["model"]
    stops = torch.tensor(stop_tokens(reference), dtype=torch.long, device=ids.device)
    wanted, gaps = _continue(reference, ids, tokens, lambda written: bool(_ended(written, stops).any(1).all()))
    ended = _ended(wanted, stops)
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, wanted.shape[1])  # [B], the end-of-text token too
    within = torch.arange(wanted.shape[1], device=ids.device) < lengths[:, None]

    def differ(written: Tensor) -> Tensor:
        """Where tokens ``[B, T']`` are others than the reference's, as far as it wrote some."""
        return (written != wanted[:, : written.shape[1]]) & within[:, : written.shape[1]]

    written, _ = _continue(model, ids, wanted.shape[1], lambda written: bool(differ(written).any(1).all()))
    differs = differ(written)
    equal = torch.where(differs.any(1), differs.int().argmax(1), lengths)
    gap = gaps.gather(1, equal.clamp(max=wanted.shape[1] - 1)[:, None])[:, 0]
    return torch.stack((lengths.double(), equal.double(), gap.double()), 1).cpu()


def _ended(written: Tensor, stops: Tensor) -> Tensor:
    return torch.isin(written, stops)


def _continue(model: Any, ids: Tensor, tokens: int, is_done: Callable[[Tensor], bool]) -> tuple[Tensor, Tensor]:
    """The likeliest tokens behind prompts ``[B, P]``, and the gaps to the second likeliest, in nats: ``[B, T]`` each.

    Args:
        model: a transformers model, which makes its own cache.
        ids: the prompts.
        tokens: T, the most tokens.
        is_done: whether tokens ``[B, T']`` suffice, so that no more are computed.
    """
    chosen, gaps = list[Tensor](), list[Tensor]()
    for token, logits in islice(greedy(model, ids), tokens):
        two = logits.float().topk(2).values  # a difference of logits is one of log-probabilities
        gaps.append(two[:, 0] - two[:, 1])
        chosen.append(token)
        if is_done(torch.stack(chosen, 1)):
            break
    return torch.stack(chosen, 1), torch.stack(gaps, 1)
