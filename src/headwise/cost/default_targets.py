"""What is tried on a model's cache where the user names nothing: formats of fewer bits, and sizes of conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headwise.specs import AttentionSpec, GroupedSpec, ModelSpec, RecurrentSpec


@dataclass(frozen=True)
class PlainFormat:
    """A format of a cache of keys and values.

    Attributes:
        bits: of one value, scales included.
        group: the channels, or tokens of a channel, that share a scale.
        needs_power_of_two: whether heads are rotated by a Hadamard matrix, which their width must suit.
        has_blocks: whether keys share scales over a block of tokens.
    """

    bits: float
    group: int
    needs_power_of_two: bool = False
    has_blocks: bool = False

    def suits(self, layer: AttentionSpec) -> bool:
        """Whether a layer's cache can be stored in it: groups divide the width of a head, or hold all of it.

        Latents are not stored in formats, and blocks of tokens not within windows; states of recurrent layers stay as
        they are.

        For example ``PLAIN_FORMATS["int8"].suits(layer_spec("llama-3-8b"))`` is True.
        """
        if isinstance(layer, RecurrentSpec):
            return True
        if not isinstance(layer, GroupedSpec) or layer.shares_kv:
            return False
        if self.has_blocks and layer.sliding_window is not None:
            return False
        widths = (layer.head_dim, layer.value_dim)
        fits = all(width % self.group == 0 or self.group >= width for width in widths)
        return fits and not (self.needs_power_of_two and any(width & (width - 1) for width in widths))


PLAIN_FORMATS: Mapping[str, PlainFormat] = MappingProxyType(
    {
        "int8": PlainFormat(8.5, 64),
        "int8/int4": PlainFormat(6.5, 64),
        "kivi4": PlainFormat(4.5, 64, has_blocks=True),
        "int4+hadamard/int4": PlainFormat(4.5, 64, needs_power_of_two=True),
        "kivi3:32": PlainFormat(4.0, 32, has_blocks=True),
        "kivi3": PlainFormat(3.5, 64, has_blocks=True),
        "kivi2:32": PlainFormat(3.0, 32, has_blocks=True),
        "kivi2": PlainFormat(2.5, 64, has_blocks=True),
    }
)
"""The formats that conversions are compared with, from the most bytes to the least; of equal bytes the best first."""

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
