"""What every conversion method declares, and how it is asked to solve one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from headwise.conversion.solvers.layer import Layer
from headwise.conversion.solvers.metrics import KEY_WEIGHT
from headwise.conversion.solvers.statistics import Statistics
from headwise.specs import GroupedSpec, LatentSpec, ModelSpec

LONGEST = 2048
"""Without a text, the longest distance between query and key that is taken to be attended to, in tokens."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one layer beside its weights.

    Attributes:
        statistics: means over a text; None where no text was read.
        sensitivity: ``[E, E]`` float64, the cost of an error of the layer's output; None for the same cost in every
            direction.
    """

    statistics: Statistics | None = None
    sensitivity: Tensor | None = None


@dataclass(frozen=True)
class LayerTarget:
    """What one layer becomes.

    Attributes:
        spec: the converted layer.
        key_weight: for MLA, the cost of an error of the keys relative to one of the values.
        rotary_channels: for MLA, bool ``[F, K]``, the channels that keep their rotation; when None, the layer keeps
            those that it needs most.
        mixes_heads: for MLA, whether key heads are mixed into rotary channels (the stage ``channels``).
        longest: without a text, the longest distance that counts, in tokens.
    """

    spec: GroupedSpec | LatentSpec
    key_weight: float = KEY_WEIGHT
    rotary_channels: Tensor | None = None
    mixes_heads: bool = True
    longest: int = LONGEST


class Method(ABC):
    """A way to make a layer's new attention. A subclass is one file of this room, which assigns ``METHOD``.

    Attributes:
        name: what a user writes after ``--method``.
        label: what tables call it.
        usage: every spelling of the name, for help and error messages; the name alone when empty.
        targets: the mechanisms it makes: ``mha``, ``gqa``, ``mqa``, ``mla``.
        stages: the `STAGES` it has.
        variants: the spellings that a comparison of methods tries, the best of which is shown; the name alone when
            empty.
        is_default: whether it is chosen where the user names none.
        is_selectable: whether a user can name it.
        uses_text: whether a text, or statistics of one, can make its result better.
        needs_text: whether it is refused without.
        is_cheap: whether a layer is made as fast as it is read, so that keeping it for a later run saves nothing.
        shares_channels: whether all layers can be given the same rotary channels, as some folder formats need.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    usage: ClassVar[str] = ""
    targets: ClassVar[frozenset[str]]
    stages: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[str, ...]] = ()
    is_default: ClassVar[bool] = False
    is_selectable: ClassVar[bool] = True
    uses_text: ClassVar[bool] = True
    needs_text: ClassVar[bool] = False
    is_cheap: ClassVar[bool] = False
    shares_channels: ClassVar[bool] = False

    @property
    def spelling(self) -> str:
        """The name with its parameters, as a user writes it."""
        return self.name

    @property
    def title(self) -> str:
        """The label with its parameters, as tables show it."""
        return self.label

    def parsed(self, spelling: str) -> Self | None:
        """The method that a user's spelling names, or None where it is another's."""
        return self if spelling == self.name else None

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the method makes ``target`` of ``source``."""
        return target.mechanism in self.targets

    def check(self, source: ModelSpec) -> None:  # noqa: B027  (most have a step for every model)
        """Refuse a model that the method has no step for.

        Raises:
            HeadwiseError: the model is one.
        """

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the result computes what the source does, beyond rounding."""
        return False

    @abstractmethod
    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """One layer's new attention.

        Args:
            source: the layer as it is, in the dtype it is stored in.
            target: what it becomes.
            evidence: what is known of it beside its weights.
        """


class MergingMethod(Method):
    """A method by which several key–value heads come to share one."""

    targets = frozenset({"gqa", "mqa"})

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """There are fewer key–value heads afterwards."""
        return super().suits(source, target) and kv_heads(target) < kv_heads(source)


def kv_heads(model: ModelSpec) -> int:
    """The key–value heads of a model's first layer."""
    layer = model.layers[0]
    assert isinstance(layer, GroupedSpec)
    return layer.num_kv_heads
