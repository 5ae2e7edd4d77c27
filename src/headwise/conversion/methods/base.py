"""`Method`: the declaration of a conversion method, its call for one layer, and how a user's name finds it.

Methods are found by their files. Checks, stages, variants and labels are read off a method's declaration, so that no
other file lists methods.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from headwise.conversion.solvers.layer import (
    Layer,
    LayerTarget,
    grouped_spec,
    latent_spec,
    seen_by_mla,
    with_norms,
    without_norms,
)
from headwise.conversion.solvers.statistics import Statistics
from headwise.errors import ArgumentError
from headwise.models.specs import GroupedSpec, ModelSpec, as_latent


@dataclass(frozen=True)
class Evidence:
    """Measurements of one layer on a text.

    Attributes:
        statistics: the means over a text, of the layer's inputs or, for MLA, of what `seen_by_mla` makes of them;
            None without a text.
        sensitivity: the cost of an error of the layer's output, float64 ``[E, E]``; None where every direction costs
            the same.
    """

    statistics: Statistics | None = None
    sensitivity: Tensor | None = None


class Method(ABC):
    """A method to convert a layer's attention. A subclass is one file of this folder, which assigns ``METHOD``.

    For example ``convert(source, output, to="mqa", method="mean")`` uses the method whose name is ``mean``.

    Attributes:
        name: the name that users give after ``--method``.
        label: the name in tables.
        usage: every spelling of the name, for help and error messages; the name alone when empty.
        targets: the mechanisms that it converts to: ``mha``, ``gqa``, ``mqa``, ``mla``.
        stages: the stages of `STAGES` that it has.
        variants: the spellings that a comparison of methods tries, of which the best is shown; the name alone when
            empty.
        is_default: whether it is chosen where the user names no method.
        is_selectable: whether a user can name it.
        uses_text: whether a text, or statistics of one, can improve its result.
        needs_text: whether it is refused without a text or statistics.
        is_cheap: whether a layer is solved as fast as it is read, so that saving it for a later run gains nothing.
        shares_channels: whether it keeps the rotary channels of `LayerTarget`, which are of headwise's own kind
            (`solvers.rope_channels`), so that all layers can have one list of them, as some folder formats need.
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
        """The method that a user's spelling names; None if the spelling is another method's."""
        return self if spelling == self.name else None

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the method converts ``source`` to ``target``."""
        return target.mechanism in self.targets

    def check(self, source: ModelSpec) -> None:  # noqa: B027  (most methods convert every model)
        """Refuse a model that the method cannot convert.

        Raises:
            HeadwiseError: the model has such a layer.
        """

    def is_exact(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the result computes what the source computes, apart from rounding."""
        return False

    @abstractmethod
    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """Convert one layer's attention.

        Args:
            source: the source layer, in the dtype it is stored in.
            target: the converted layer's spec and settings.
            evidence: the layer's measurements on a text, if there is one.
        """


class GroupedMethod(Method):
    """A method to another number of key–value heads."""

    targets = frozenset({"mha", "gqa", "mqa"})

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """Convert one layer by `solve_heads`."""
        spec = grouped_spec(target.spec)
        state = self.solve_heads(source.state, grouped_spec(source.spec), spec, evidence)
        return Layer(spec, state, norm_eps=source.norm_eps)

    @abstractmethod
    def solve_heads(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: GroupedSpec, evidence: Evidence
    ) -> dict[str, Tensor]:
        """Convert one layer's tensors.

        Args:
            state: the source layer's tensors by its own names, in the dtype they are stored in.
            source: the source layer's spec.
            target: the converted layer's spec.
            evidence: the layer's measurements on a text, if there is one.

        Returns:
            The converted layer's tensors by its own names.
        """


class LatentMethod(Method):
    """A method to MLA."""

    targets = frozenset({"mla"})

    def solve(self, source: Layer, target: LayerTarget, evidence: Evidence) -> Layer:
        """Convert one layer by `solve_latent`; one with norms as `solvers.layer` has it."""
        seen, wanted = seen_by_mla(source)[0], latent_spec(target.spec)
        own = grouped_spec(seen.spec)
        spec = without_norms(wanted, own)
        solved = Layer(spec, *self.solve_latent(seen.state, own, replace(target, spec=spec), evidence))
        return with_norms(source, solved, wanted)

    @abstractmethod
    def solve_latent(
        self, state: Mapping[str, Tensor], source: GroupedSpec, target: LayerTarget, evidence: Evidence
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Convert one layer's tensors.

        Args:
            state: the source layer's tensors by its own names, in the dtype they are stored in.
            source: the source layer's spec.
            target: the converted layer's spec, which is MLA's, and settings.
            evidence: the layer's measurements on a text, if there is one.

        Returns:
            The converted layer's tensors by its own names, and the model frequency of each rotary pair.
        """

    def solve_sizes(
        self, source: Layer, sizes: Sequence[tuple[int, int]], target: LayerTarget, evidence: Evidence
    ) -> Iterator[tuple[tuple[int, int], Layer]]:
        """Solve one layer at several sizes for the stage ``spread``, one at a time, as each may be large.

        Args:
            source: the source layer, float32.
            sizes: the rank R and the rotary width P of each solution.
            target: the settings of every solution; its spec is of another size.
            evidence: the layer's measurements on a text.

        Returns:
            Each size with its solution, in any order.
        """
        for size in sizes:
            yield size, self.solve(source, replace(target, spec=as_latent(source.spec, *size)), evidence)


class MergingMethod(GroupedMethod):
    """A method that merges several key–value heads into one."""

    targets = frozenset({"gqa", "mqa"})

    def suits(self, source: ModelSpec, target: ModelSpec) -> bool:
        """Whether the target has fewer key–value heads."""
        return super().suits(source, target) and kv_heads(target) < kv_heads(source)


def kv_heads(model: ModelSpec) -> int:
    """The number of key–value heads of a model's first layer."""
    return grouped_spec(model.layers[0]).num_kv_heads


_PACKAGE = __name__.rpartition(".")[0]


@cache
def all_methods() -> tuple[Method, ...]:
    """All methods, sorted by name: ``[method.name for method in all_methods()]``."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    modules = (importlib.import_module(f"{_PACKAGE}.{file.name}") for file in files)
    declared = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return tuple(sorted(declared, key=lambda method: method.name))


def find_method(spelling: str) -> Method:
    """Find the method that a user names, such as ``find_method("transmla:4")``.

    Raises:
        ArgumentError: no method has that name.
    """
    selectable = [method for method in all_methods() if method.is_selectable]
    for method in selectable:
        if (parsed := method.parsed(spelling)) is not None:
            return parsed
    latent, merging = (
        ", ".join(method.usage or method.name for method in selectable if ("mla" in method.targets) == is_latent)
        for is_latent in (True, False)
    )
    raise ArgumentError("method", spelling, f"must be one of {merging}; or for mla {latent}")


def choose_method(spelling: str | None, source: ModelSpec, target: ModelSpec) -> Method:
    """Choose the method that a user named, or the default for the target.

    Args:
        spelling: the method's name with its parameters; None for the default.
        source: the source model.
        target: the converted model.

    Raises:
        ArgumentError: no method has that name, or it does not make that target.
        SpecError: the method cannot convert a layer of the source.
    """
    if spelling is None:
        method = next(method for method in all_methods() if method.is_default and method.suits(source, target))
    else:
        method = find_method(spelling)
        if not method.suits(source, target):
            merges = "mla" not in method.targets
            rule = "merges key–value heads, and none are merged here" if merges else "goes with mla"
            raise ArgumentError("method", spelling, rule)
    method.check(source)
    return method
