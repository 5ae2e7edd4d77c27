"""Activation memory: what a training step keeps of a layer's forward pass for its backward pass.

A mechanism lists the tensors that autograd keeps of headwise's layer, each storage once and without the parameters.
Symbols: B batch, S new tokens, T the tokens attended to.

The kept tensors do not follow from the stages of a layer: they depend on what kernels save, and on which tensors
share a storage. They are therefore listed here on their own, and tests compare the list with what autograd saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.costs.formulas.stages import Call, Kernel, Size

KeptOver = Literal["new", "total", "scores", "mask", "queries", "keys", "call", "once"]
"""A kept tensor has one entry for each of these: each new token, each token attended to, each (query, key) pair of a
sequence, each pair of positions, each position of a query or of a key, or each sequence; ``once`` is a single
entry."""

Width = Literal["dtype", "float32", "byte", "index"]
"""The width of a kept value: that of the layer's dtype, that of float32 at least, a mask's byte, an 8-byte index."""


@dataclass(frozen=True)
class KeptTensor:
    """A kept tensor, which has ``values`` numbers for each token, pair or sequence, as ``over`` says."""

    name: str
    values: int
    over: KeptOver
    width: Width = "dtype"

    def nbytes(self, call: Call, value_bytes: Size) -> Size:
        """Bytes of the tensor in a call, where one value of the layer's dtype has ``value_bytes``."""
        count: dict[KeptOver, Size] = {
            "new": call.batch * call.new,
            "total": call.batch * call.total,
            "scores": call.batch * call.new * call.total,
            "mask": call.new * call.total,
            "queries": call.new,
            "keys": call.total,
            "call": call.batch,
            "once": Size(1),
        }
        widths: dict[Width, int] = {"dtype": value_bytes, "float32": max(value_bytes, 4), "byte": 1, "index": 8}
        width = widths[self.width]
        return count[self.over] * self.values * (value_bytes if width == value_bytes else width)


@dataclass(frozen=True)
class Training:
    """How a training step runs a layer.

    Attributes:
        kernel: the kernel of attention: fused (``padded`` is SDPA on the CPU), or the reference's plain products.
        half: whether the layer's dtype has fewer bits than float32.
        causal: whether the scores are masked by the causal flag.
        window: whether there is a sliding window's mask too, which a fused kernel takes as a tensor.
        cross: whether keys and values are another sequence's.
        batch_of_one: whether there is one sequence, whose heads are laid out head by head without a copy.
    """

    kernel: Kernel
    half: bool
    causal: bool
    window: bool
    cross: bool
    batch_of_one: bool

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel is used, which never holds the scores."""
        return self.kernel != "unfused"

    @property
    def is_masked(self) -> bool:
        """Whether unfused scores go through a mask."""
        return self.causal or self.window


def inputs(training: Training, hidden_size: Size) -> tuple[KeptTensor, ...]:
    """The inputs of the first projections."""
    source = (KeptTensor("key_value_states", hidden_size, "total"),) if training.cross else ()
    return KeptTensor("hidden_states", hidden_size, "new"), *source


def rotation(training: Training, dims: Size) -> tuple[KeptTensor, ...]:
    """cos and sin of every position, each ``dims``/2 wide; queries and keys share them except in cross-attention."""
    keys = (KeptTensor("cos, sin of keys", dims, "keys"),) if training.cross else ()
    return KeptTensor("cos, sin", dims, "queries"), *keys


def norm(
    training: Training, name: str, width: Size, over: KeptOver, *, rows: int = 1, storage: Size | None = None
) -> tuple[KeptTensor, ...]:
    """Tensors of an RMSNorm: input (the storage that it is a view of, or a float32 copy), inverse norms, output."""
    held = width if training.half or storage is None else storage
    return (
        KeptTensor(name, held, over, "float32" if training.half else "dtype"),
        KeptTensor(f"{name} inverse norms", rows, over, "float32"),
        KeptTensor(f"{name} normed", width, over),
    )


@dataclass(frozen=True)
class Heads:
    """Sizes of softmax(QKᵀ)V: H query heads, K key–value heads, D wide for queries and keys and V for values.

    The unfused way repeats keys and values to H heads, and the padded kernel widens the narrower of D and V.
    """

    H: Size
    K: Size
    D: Size
    V: Size


@dataclass(frozen=True, kw_only=True)
class Storages:
    """Values a token of the tensors that query, key and value are views of; None where they are tensors of their own.

    A value that is a view of the key's tensor has storage 0: it is counted with the key.
    """

    query: Size | None = None
    key: Size | None = None
    value: Size | None = None


def core(
    training: Training,
    heads: Heads,
    *,
    storages: Storages = Storages(),
    contiguous: bool = True,
    read_from: Literal["merged", "heads", "nothing"] = "merged",
) -> tuple[KeptTensor, ...]:
    """Tensors of softmax(QKᵀ)V, and its result as the operation behind it keeps it.

    Args:
        training: how the layer is run.
        heads: the numbers of heads and their widths.
        storages: the tensors that query, key and value are views of.
        contiguous: whether the query is a tensor of its own, laid out head by head; else the fused kernel's output is
            laid out token by token as the projection is, and merging its heads needs no copy.
        read_from: whether the heads are merged before they are read, read head by head, or are the layer's output,
            which nothing else reads.
    """
    H, K, D, V = heads.H, heads.K, heads.D, heads.V
    if training.is_fused:
        width = V if V > D else D
        scored, mixed = (width, width) if training.kernel == "padded" else (D, V)
        mask = (KeptTensor("window's mask", 1, "mask"),) if training.window else ()
        by_head = V > 1 or not training.batch_of_one
        copied = by_head if contiguous or scored > D else mixed > V > 1
        merged = (KeptTensor("merged heads", H * V, "new"),) if copied and H > 1 and read_from == "merged" else ()
        return (
            KeptTensor("query", H * scored if scored > D or storages.query is None else storages.query, "new"),
            KeptTensor("key", K * scored if scored > D or storages.key is None else storages.key, "total"),
            KeptTensor("value", K * mixed if mixed > V or storages.value is None else storages.value, "total"),
            *mask,
            KeptTensor("attention output", H * mixed, "new"),
            KeptTensor("log-sum-exp", H, "new", "float32"),
            *merged,
        )
    is_view = not training.half and (H == 1 or training.batch_of_one)
    query = storages.query if is_view and storages.query is not None else H * D
    output = () if read_from == "nothing" else (KeptTensor("attention output", H * V, "new"),)
    return (
        KeptTensor("query", query, "new", "float32"),
        KeptTensor("key", H * D, "total", "float32"),
        KeptTensor("value", H * V, "total", "float32"),
        *softmax(training, H),
        *output,
    )


def softmax(training: Training, H: Size) -> tuple[KeptTensor, ...]:
    """The attention weights, and a second copy where a mask has set rows with nothing to attend to to zero."""
    weights = KeptTensor("attention weights", H, "scores", "float32")
    if not training.is_masked:
        return (weights,)
    return weights, KeptTensor("masked weights", H, "scores", "float32"), KeptTensor("masks", 2, "mask", "byte")
