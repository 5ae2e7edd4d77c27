"""The spec of layers without softmax attention, whose state has a constant size for any context.

Stacks mix such layers with attention. Their weights, projections and states are exact, so that a hybrid model's cache
and weights are right, though no layer here runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import SpecError
from headwise.models.specs.base import AttentionSpec, bias_names, check_positive

_SIZES = {
    "mamba": ("num_heads", "head_dim", "state_size", "conv_kernel", "dt_rank"),
    "mamba2": ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel"),
    "gated_delta_net": ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel"),
    "kimi_delta": ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel"),
    "short_conv": ("num_heads", "head_dim", "conv_kernel"),
    "none": (),
}
"""The sizes that each form has; those of other forms are 0."""
NAMES = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "gated_delta_net": "Gated DeltaNet",
    "kimi_delta": "Kimi delta",
    "short_conv": "short conv",
    "none": "none",
}
"""Each form's name in tables."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(AttentionSpec):
    """A layer's mixer other than softmax attention; headwise has its costs, and no layer that runs.

    For example ``RecurrentSpec(hidden_size=512, form="short_conv", num_heads=512, head_dim=1, conv_kernel=3)``.

    Source: Mamba (arXiv:2312.00752) with Jamba's norms (arXiv:2403.19887), Mamba-2 (arXiv:2405.21060), Gated
    DeltaNet (arXiv:2412.06464), Kimi Linear (arXiv:2510.26692), LFM2's gated short convolution.

    Attributes:
        form: ``mamba``, ``mamba2``, ``gated_delta_net``, ``kimi_delta``, ``short_conv``, or ``none`` for a layer
            without a mixer. Sizes that a form does not have are 0.
        num_heads: H, heads of the state; in Mamba and short convolutions one for each channel.
        head_dim: D, values of a head.
        state_size: N, numbers kept for each value: the SSM's state, or the width of a key.
        num_groups: G, heads of B and C, or of keys and queries.
        conv_kernel: the number of tokens that the causal convolution before the recurrence sees.
        dt_rank: width of Mamba's time step before it is projected.
    """

    form: str
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    num_groups: int = 0
    conv_kernel: int = 0
    dt_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in _SIZES:
            raise SpecError("form", self.form, f"must be one of {', '.join(_SIZES)}")
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel", "dt_rank"):
            if name in _SIZES[self.form]:
                check_positive(name, getattr(self, name))
            elif getattr(self, name) != 0:
                raise SpecError(name, getattr(self, name), f"must be 0: {self.form} has none")
        projections = () if self.form == "none" else ("in_proj", "conv1d", "out_proj")
        object.__setattr__(self, "bias", bias_names(self.bias, projections=projections, shorthands={}))

    @property
    def mechanism(self) -> str:
        """The form of the mixer."""
        return self.form

    @property
    def label(self) -> str:
        """A label such as ``Mamba-2 128 × 64 × 128``: heads, values of a head, numbers kept for each."""
        sizes = [size for size in (self.num_heads, self.head_dim, self.state_size) if size > 1]
        return " ".join([NAMES[self.form], " × ".join(map(str, sizes))]).rstrip()
