"""The rotary embedding of a ``config.json``, in any of its spellings."""

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
    """The rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``.

    Args:
        head_dim: a head's width; all that rotates where ``fraction`` is None.
        theta: the family's base, where the file names none.
        fraction: the family's rotated part of a head, where the file names none; None where it is the whole always.
        interleaved: pairs are neighbours.
        layer_type: which of ``rope_parameters``, where they are told apart.
        local_theta: the family's base of sliding layers, which are never scaled; None where it has one for all.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise SpecError("rope_parameters", parameters, "must be a JSON object")
    base = config.get("rope_theta", theta)
    if isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    elif layer_type == "sliding_attention" and local_theta is not None:
        parameters, base = {}, config.get("rope_local_base_freq", local_theta)
    kept = {key: value for key, value in parameters.items() if value is not None}
    rope_type = kept.pop("rope_type", kept.pop("type", "default"))
    base = kept.pop("rope_theta", base)
    if (rotated := optional_integer(config, "rotary_dim")) is not None:
        fraction = rotated / head_dim
    said = kept.pop("partial_rotary_factor", config.get("partial_rotary_factor") or fraction or 1.0)
    part = number("partial_rotary_factor", said)
    if not 0 < part <= 1:
        raise SpecError("partial_rotary_factor", part, "must be above 0 and at most 1")
    if rope_type == "proportional":
        # It keeps the head's whole width and stops the frequencies beyond the fraction instead.
        kept["partial_rotary_factor"], part = part, 1.0
    if rope_type in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" not in kept:
        kept["original_max_position_embeddings"] = integer(
            config, "original_max_position_embeddings", "max_position_embeddings"
        )
    return RopeSpec(
        dim=head_dim if fraction is None else int(head_dim * part),
        theta=number("rope_theta", base),
        rope_type=str(rope_type),
        parameters=tuple(
            (key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(kept.items())
        ),
        interleaved=interleaved,
        max_position_embeddings=optional_integer(config, "max_position_embeddings"),
    )


def yarn_softmax_scale(rope: RopeSpec | None, qk_head_dim: int) -> float | None:
    """YaRN's temperature, which DeepSeek applies to the scores rather than to cos and sin."""
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
