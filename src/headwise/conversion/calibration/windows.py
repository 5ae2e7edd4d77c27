"""The windows that a conversion is calibrated on: text, repeated passages, and tokens that begin a text.

Text alone says little about what a model looks up thousands of tokens back: it seldom does, and a window is shorter.
So in some windows the second half repeats passages of the first half, in another order, and stands at positions far
behind it. RoPE sees nothing but positions, so such a window costs no more than any other, and asks the attention for
the same as a long text does: to find a passage far back, and to go on as it went on.

One more window has tokens that begin a text each. Many models rest their attention on the first token of a text,
whatever it is: within a few layers its state grows to hundreds of times the size of any other, and later tokens
attend to it where they look for nothing. At that token attention returns the token's own values. Where these are
wrong, its state does not grow, and every later token is predicted badly; and windows begin with so few different
tokens that nothing else keeps a conversion from that.

Shapes: N windows, W tokens in each, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.conversion.solvers.device import CPU, to_device
from headwise.conversion.solvers.layer import Layer, Rotation, rotation_tables
from headwise.conversion.solvers.refit import Cost, OutputRefit, WeighedTokens
from headwise.models.specs import AttentionSpec, GroupedSpec, ModelSpec
from headwise.runtime.hf import LayerwiseModel, seen_positions

EVERY = 3
"""One window in so many repeats passages."""

FIRST = 2
"""The number of the first window that repeats passages."""

FIRST_HELD = 1
"""The number of the first window among the held-out ones that repeats passages."""

PASSAGES = 8
"""The number of passages that half of a window is cut into."""

ALIKE = 4
"""The number of passages that begin with the same tokens, where some do."""

_ALIKE_TOKENS = 32
_SHORT_TOKENS = 16
_SHARED = (slice(0, 4), slice(6, 8))
"""The tokens that such passages share; the two between them tell one passage from another."""


@dataclass(frozen=True, eq=False)
class CalibrationWindows:
    """Windows of tokens, and the positions of these tokens.

    Attributes:
        ids: the token ids, ``[N, W]``.
        positions: the positions of the tokens, ``[N, W]``, rising in every window.
        repeats: whether a window repeats passages of itself, bool ``[N]``.
        held: the number of windows at the end that decide between solutions and are not trained on.
        first_tokens: the ids of tokens that each begin a text, ``[W]``; None where none are calibrated on. They go
            through the model as one more window, which is the last.
        begin: the number of tokens at the beginning of each window that the tokenizer puts before any text.
    """

    ids: Tensor
    positions: Tensor
    repeats: Tensor
    held: int = 0
    first_tokens: Tensor | None = None
    begin: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """The number of tokens of all windows."""
        return self.ids.numel()

    @property
    def width(self) -> int:
        """W, the number of tokens in a window."""
        return self.ids.shape[1]

    @property
    def train(self) -> int:
        """The number of windows that are trained on, which are the first ones."""
        return len(self.ids) - self.held

    def __getitem__(self, which: slice | Tensor) -> CalibrationWindows:
        """Some of the windows, of which none counts as held out."""
        return CalibrationWindows(self.ids[which], self.positions[which], self.repeats[which], begin=self.begin)

    def to(self, device: torch.device) -> CalibrationWindows:
        """The windows on a device."""
        ids, positions, repeats = (tensor.to(device) for tensor in (self.ids, self.positions, self.repeats))
        first_tokens = None if self.first_tokens is None else self.first_tokens.to(device)
        return CalibrationWindows(ids, positions, repeats, self.held, first_tokens, self.begin)

    @property
    def rows(self) -> int:
        """The number of windows that go through the model: these, and the one of first tokens."""
        return len(self.ids) + (self.first_tokens is not None)

    def are_first_tokens(self, window: int) -> bool:
        """Whether a window that goes through the model is that of first tokens."""
        return window == len(self.ids)

    @property
    def trained(self) -> CalibrationWindows:
        """The windows to train on."""
        return self[: self.train]

    @property
    def held_out(self) -> CalibrationWindows:
        """The held-out windows."""
        return self[self.train :]

    @property
    def text(self) -> CalibrationWindows:
        """The windows that are plain text. Where far passages count as much as all else, perplexity gets worse."""
        return self[~self.repeats]

    def seen_by(self, layer: AttentionSpec) -> Tensor:
        """The positions ``[N, W]`` as a layer sees them; see `headwise.hf.seen_positions`."""
        return torch.stack([seen_positions(layer, row) for row in self.positions])

    def placed(self, model: LayerwiseModel, window: int) -> LayerwiseModel:
        """The model for the positions of one window; for first tokens, for windows of one token."""
        return model.of_width(1) if self.are_first_tokens(window) else model.at(self.positions[window])

    def rotation(self, layer: GroupedSpec, window: int) -> Rotation | None:
        """The rotary tables of one window in a layer; None without RoPE."""
        return rotation_tables(layer, seen_positions(layer, self.positions[window]))


def plain_windows(ids: Tensor, held: int = 0, begin: int = 0) -> CalibrationWindows:
    """Windows ``[N, W]`` of text whose tokens stand at positions 0 … W − 1; see `CalibrationWindows`."""
    count, width = ids.shape
    positions, repeats = torch.arange(width).repeat(count, 1), torch.zeros(count, dtype=torch.bool)
    return CalibrationWindows(ids, positions, repeats, held, begin=begin)


def recall_windows(
    ids: Tensor, held: int, model: ModelSpec, *, alike: bool = False, begin: int = 0
) -> CalibrationWindows:
    """Make one window in `EVERY` repeat passages of itself from far behind; an encoder's stay as they are.

    With ``alike``, each `ALIKE` of the passages begin with the same tokens but for two: to continue one of them as it
    continued, a model has to find the right one, as where several facts of a kind stand in a text.

    For example ``recall_windows(ids, 2, open_checkpoint("./model").spec)``. Equal arguments give equal windows.

    Args:
        ids: the token ids of a text, ``[N, W]``.
        held: the number of windows at the end that are held out.
        model: the spec of the source, whose RoPE and number of positions say how far behind passages can be.
        alike: whether passages begin with the same tokens. They are then of `_ALIKE_TOKENS` tokens.
        begin: the number of tokens before the text in each window (see `CalibrationWindows`); passages are cut behind
            them.
    """
    windows = plain_windows(ids.clone(), held, begin)
    half = windows.width // 2
    text = half - begin
    alike = alike and text >= ALIKE * _ALIKE_TOKENS
    passage = _ALIKE_TOKENS if alike else text // PASSAGES
    count = text // passage if alike else PASSAGES
    if passage < 2 or not model.is_causal:
        return windows
    generator = torch.Generator().manual_seed(0)
    train = windows.train
    for window in [*range(FIRST, train, EVERY), *range(train + FIRST_HELD, len(ids), EVERY)]:
        _repeat(windows.ids[window], passage, count, generator, alike=alike, begin=begin)
        windows.repeats[window] = True
        windows.positions[window, half:] += _gap(model, windows.width, float(torch.rand((), generator=generator)))
    return windows


def repeating_pieces(ids: Tensor, begin: int = 0) -> Tensor:
    """Pieces of text whose second half repeats passages of the first half that begin alike, in another order.

    They stand at the positions of any text. For example ``repeating_pieces(torch.arange(512)[None]).shape`` is
    ``(1, 512)``; equal arguments give equal pieces.

    Args:
        ids: the token ids of a text, ``[N, T]``. Where T is too short for `ALIKE` passages twice, the result is ``[0,
            T]``.
        begin: the number of tokens before the text in each piece (see `CalibrationWindows`); passages are cut behind
            them.
    """
    count = (ids.shape[1] // 2 - begin) // _SHORT_TOKENS
    if count < ALIKE:
        return ids[:0]
    pieces, generator = ids.clone(), torch.Generator().manual_seed(0)
    for piece in pieces:
        _repeat(piece, _SHORT_TOKENS, count, generator, alike=True, begin=begin)
    return pieces


def _repeat(window: Tensor, passage: int, count: int, generator: torch.Generator, *, alike: bool, begin: int) -> None:
    """Let the second half of a window ``[W]`` repeat its first passages, in another order."""
    half = len(window) // 2
    passages = window[begin : begin + passage * count].view(count, passage)
    if alike:
        _make_alike(passages)
    order = torch.randperm(count, generator=generator, device=generator.device)  # drawn on the CPU, for all devices
    window[half : half + passage * count] = passages[order].flatten()


def _make_alike(passages: Tensor) -> None:
    """Write into passages ``[N, P]`` what each `ALIKE` of them share: tokens of the first of these."""
    for start in range(0, len(passages) - ALIKE + 1, ALIKE):
        group = passages[start : start + ALIKE]
        for shared in _SHARED:
            group[:, shared] = group[0, shared].clone()


def _gap(model: ModelSpec, width: int, part: float) -> int:
    """The number of positions left out in the middle of a window: log-uniform up to all that the model has left."""
    if not model.max_position_embeddings or not any(_has_rope(layer) for layer in model.layers):
        return 0
    most = max(model.max_position_embeddings - width, 0)
    least = min(width, most)
    return round(least * (most / least) ** part) if least else 0


def _has_rope(layer: AttentionSpec) -> bool:
    return isinstance(layer, GroupedSpec) and layer.rope is not None


DRAWN = 64
"""The number of first tokens that each step of the descent draws at random."""

SHARE = 0.05
"""The weight of the mean cost of first tokens, beside that of the tokens of windows."""

_BOS_EVERY = 4
"""One first token in so many is the one that the tokenizer puts before any text, if it puts one."""


def first_token_ids(windows: CalibrationWindows) -> Tensor:
    """W token ids that begin a text each: of the text's different tokens, drawn at random, and one before any text.

    For example ``first_token_ids(plain_windows(torch.arange(8)[None]))``.

    Args:
        windows: the windows of a text.
    """
    found: Tensor = torch.unique(windows.trained.ids)
    drawn = found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]
    ids = drawn[torch.arange(windows.width) % len(drawn)]
    if windows.begin:
        ids[::_BOS_EVERY] = windows.ids[0, 0]
    return ids


@dataclass(frozen=True)
class FirstTokens:
    """The first tokens in the layer that is being converted.

    Attributes:
        inputs: the inputs of the attention, ``[W, E]``.
        wanted: the outputs that the attention should have, ``[W, E]``.
        rotation: the rotary tables of any window.
        cost: the cost of an error of an output.
    """

    inputs: Tensor
    wanted: Tensor
    rotation: Rotation | None
    cost: Cost

    def output(self, layer: Layer) -> Tensor:
        """A layer's outputs, ``[W, E]``."""
        return layer.own_output(self.inputs, self.rotation)

    def error(self, layer: Layer) -> Tensor:
        """The error of a layer's outputs, ``[W, E]``."""
        return self.output(layer).float() - self.wanted

    def limited(self, layer: Layer) -> FirstTokens:
        """The first tokens with a limit to the cost of one, by a layer's errors; see `Cost.limited`."""
        return replace(self, cost=self.cost.limited(self.cost.plain(self.error(layer))))

    def drawn(self, count: int, generator: torch.Generator) -> FirstTokens:
        """A number of the tokens, drawn at random."""
        rows = to_device(torch.randperm(len(self.inputs), generator=generator, device=CPU)[:count])
        return replace(self, inputs=self.inputs[rows], wanted=self.wanted[rows])

    def weighed(self, refit: OutputRefit, layer: Layer, beside: int) -> WeighedTokens:
        """The tokens for a refit of a layer's output projection; they count `SHARE` of the tokens ``beside`` them."""
        tokens = refit.weighed(layer.own_values(self.inputs, self.rotation), self.wanted, self.cost)
        return tokens._replace(weighted=tokens.weighted * (SHARE * beside / len(self.inputs)))
