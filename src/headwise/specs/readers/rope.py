"""Read the rotary embedding of a ``config.json``, however it is written."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headwise.errors import SpecError
from headwise.specs.base import RopeSpec
from headwise.specs.readers.fields import Config, integer, number, optional_integer


def read_rope(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    fraction: float | None = 1.0,
    interleaved: bool = False,
    layer_type: str = "full_attention",
    local_theta: float | None = None,
) -> RopeSpec:
    """Read the rotary embedding from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        config: the config.
        head_dim: width of a head.
        theta: the family's default base.
        fraction: the family's default of the rotated part of a head; None where the whole head is always rotated.
        interleaved: whether pairs are neighbours.
        layer_type: which of ``rope_parameters`` to read, where they differ by layer type.
        local_theta: the family's base in sliding layers, which are never scaled; None where all layers share one.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise SpecError("rope_parameters", parameters, "must be a JSON object")
    base = config.get("rope_theta", theta)
    if isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    elif layer_type == "sliding_attention" and local_theta is not None:
        parameters, base = {}, config.get("rope_local_base_freq", local_theta)
    scaling = {key: value for key, value in parameters.items() if value is not None}
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    base = scaling.pop("rope_theta", base)
    if (rotated_dims := optional_integer(config, "rotary_dim")) is not None:
        fraction = rotated_dims / head_dim
    factor = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor") or fraction or 1.0)
    part = number("partial_rotary_factor", factor)
    if not 0 < part <= 1:
        raise SpecError("partial_rotary_factor", part, "must be above 0 and at most 1")
    if rope_type == "proportional":
        # This kind rotates the whole head, with frequencies of 0 beyond the fraction.
        scaling["partial_rotary_factor"], part = part, 1.0
    if rope_type in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" not in scaling:
        scaling["original_max_position_embeddings"] = integer(
            config, "original_max_position_embeddings", "max_position_embeddings"
        )
    return RopeSpec(
        dim=head_dim if fraction is None else int(head_dim * part),
        theta=number("rope_theta", base),
        rope_type=str(rope_type),
        parameters=tuple(
            (key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(scaling.items())
        ),
        interleaved=interleaved,
        max_position_embeddings=optional_integer(config, "max_position_embeddings"),
    )


def yarn_softmax_scale(rope: RopeSpec | None, qk_head_dim: int) -> float | None:
    """The softmax scale with YaRN's temperature, which DeepSeek applies to scores rather than to cos and sin."""
    if rope is None or rope.rope_type == "default":
        return None
    parameters = dict(rope.parameters)
    if not parameters.get("mscale_all_dim"):
        return None
    all_dim = number("mscale_all_dim", parameters["mscale_all_dim"])
    if (factor := number("rope factor", parameters.get("factor"))) <= 1:
        return None
    mscale = 0.1 * all_dim * math.log(factor) + 1.0
    return float(qk_head_dim**-0.5 * mscale * mscale)
