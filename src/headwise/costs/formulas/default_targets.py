"""What is tried on a model's cache where the user names nothing: formats of fewer bits, and sizes of conversions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwise.models.specs import GroupedSpec, ModelSpec, RecurrentSpec

GROUPS = (16, 32, 64, 128, 256)
"""The numbers of channels that may share a scale and a zero point; one that is larger than a head holds all of it."""

GROUP = 64
"""The channels of a group where a format's spelling names no other number."""

_SCALES = 32
"""The bits of a group's scale and zero point, which are float16."""


@dataclass(frozen=True)
class PlainFormat:
    """A format of a cache of keys and values.

    Attributes:
        keys: the bits of a key's channel, without scales.
        values: the bits of a value's channel.
        group: the channels that share a scale; with blocks also the tokens of a key's channel that do. One of
            `GROUPS`.
        has_blocks: whether keys share scales over a block of tokens (KIVI).
        is_rotated: whether keys are rotated by a Hadamard matrix, which their width must suit.
    """

    keys: int
    values: int
    group: int = GROUP
    has_blocks: bool = False
    is_rotated: bool = False

    def __str__(self) -> str:
        group = "" if self.group == GROUP else f":{self.group}"
        if self.has_blocks:
            return f"kivi{self.keys}{group}"
        keys, values = f"int{self.keys}{group}{'+hadamard' * self.is_rotated}", f"int{self.values}{group}"
        return keys if keys == values else f"{keys}/{values}"

    def suits(self, model: ModelSpec) -> bool:
        """Whether a model's cache can be stored in it.

        Groups divide the width of a head, or hold all of it. Latents are not stored in formats. Windows that slide
        are not stored in blocks of tokens, and stay as they are beside other layers, as states of recurrent layers
        do.

        For example ``PlainFormat(8, 8).suits(read_spec("llama-3-8b"))`` is True.

        Args:
            model: the model.
        """
        layers = [layer for layer in model.layers if not isinstance(layer, RecurrentSpec)]
        heads = [layer for layer in layers if isinstance(layer, GroupedSpec) and not layer.shares_kv]
        stored = [layer for layer in heads if self._stores(layer)]
        return len(heads) == len(layers) and bool(stored) and all(map(self._fits, stored))

    def fitted(self, model: ModelSpec) -> PlainFormat:
        """The format with groups that suit a model, of about as many bytes; itself where it suits, or none does.

        For example ``str(PlainFormat(8, 8).fitted(read_spec("phi-2")))``, whose heads have 80 channels, is
        ``"int8:128"``, a group for a whole head.

        Args:
            model: the model.
        """
        if self.suits(model):
            return self
        others = [other for other in (replace(self, group=group) for group in GROUPS) if other.suits(model)]
        wanted = self.keys + self.values + 2 * _SCALES / self.group
        return min(others, key=lambda other: abs(2 * other.bits(model) - wanted), default=self)

    def bits(self, model: ModelSpec) -> float:
        """The mean bits of a cached value, scales included, of a model that it `suits`.

        For example ``PlainFormat(8, 8).bits(read_spec("llama-3-8b"))`` is 8.5.

        Args:
            model: the model.
        """
        taken = values = 0.0
        for layer in model.layers:
            if isinstance(layer, GroupedSpec):
                width = layer.head_dim + layer.value_dim
                values += layer.num_kv_heads * width
                taken += layer.num_kv_heads * (self._head_bits(layer) if self._stores(layer) else 16 * width)
        return taken / values

    def _stores(self, layer: GroupedSpec) -> bool:
        """Whether it is what a layer's keys and values are stored in."""
        return not (self.has_blocks and layer.sliding_window is not None)

    def _fits(self, layer: GroupedSpec) -> bool:
        """Whether its groups divide a layer's heads, or hold all of one."""
        D, V = layer.head_dim, layer.value_dim
        grouped = (V,) if self.has_blocks else (D, V)
        is_turned = not self.is_rotated or D & (D - 1) == 0
        return is_turned and all(width <= self.group or width % self.group == 0 for width in grouped)

    def _head_bits(self, layer: GroupedSpec) -> float:
        """Bits of a token's key and value in one head."""
        D, V = layer.head_dim, layer.value_dim
        of_keys = D * _SCALES / self.group if self.has_blocks else _SCALES * max(D // self.group, 1)
        return _packed(D, self.keys) + of_keys + _packed(V, self.values) + _SCALES * max(V // self.group, 1)


def _packed(width: int, bits: int) -> int:
    """Bits of the bytes that hold a row of codes."""
    return -(-width * bits // 8) * 8


PLAIN_FORMATS = (
    PlainFormat(8, 8),
    PlainFormat(8, 4),
    PlainFormat(4, 4, has_blocks=True),
    PlainFormat(4, 4, is_rotated=True),
    PlainFormat(3, 3, 32, has_blocks=True),
    PlainFormat(3, 3, has_blocks=True),
    PlainFormat(2, 2, 32, has_blocks=True),
    PlainFormat(2, 2, has_blocks=True),
)
"""The formats that conversions are compared with, from the most bytes to the least; of equal bytes the best first.

A model whose heads their groups do not divide has them with other groups (`plain_formats`).
"""


def plain_formats(model: ModelSpec) -> dict[str, PlainFormat]:
    """The formats that a model's conversions are compared with, by their spellings, as in `PLAIN_FORMATS`.

    For example ``list(plain_formats(read_spec("phi-2")))[:2]`` is ``["int8:128", "int8:128/int4:128"]``, as 64
    channels do not divide its heads of 80.

    Args:
        model: the model whose cache is stored.
    """
    fitted = (form.fitted(model) for form in PLAIN_FORMATS)
    return {str(form): form for form in fitted if form.suits(model)}


BUDGETS = (0.5, 0.25)
"""The fractions of the source's values that MLA keeps."""

BYTES = (0.5, 0.28, 0.25, 0.19, 0.15, 0.125, 0.094, 0.0625)
"""The fractions of the bytes of the source's cache in bfloat16 that MLA with codes keeps."""


def conversions(source: ModelSpec) -> list[str]:
    """The targets of the ladder that convert a model, in the order in which they are tried.

    For example ``conversions(read_spec("smollm2-135m"))[:3]`` is ``["mla:0.5", "mla:0.25", "mqa"]``.

    What takes minutes comes before what takes hours: MLA at each of `BUDGETS`, GQA at each proper divisor of the
    key–value heads, and MQA; and MLA with codes at each of `BYTES`.
    """
    heads = {layer.num_kv_heads for layer in source.layers if isinstance(layer, GroupedSpec)}
    fewest = min(heads, default=1)
    divisors = [count for count in range(fewest - 1, 1, -1) if fewest % count == 0]
    return [
        *(f"mla:{budget:g}" for budget in BUDGETS),
        *(f"gqa:{count}" for count in divisors),
        *(["mqa"] if fewest > 1 else []),
        *(f"mla@{fraction:g}" for fraction in BYTES),
    ]
