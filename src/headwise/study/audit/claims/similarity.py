"""Claims about the similarity of outputs to MHA's: C12."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headwise.study.audit.claim import Check, Claim, UntestableError, rounded_number
from headwise.study.audit.claims.speed import run_benchmark

PRINTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"MQA": ("0.0234", "0.9989"), "GQA-4": ("0.0042", "0.9998"), "latent-256": ("0.0018", "0.9999")}
)
"""The relative error and the cosine that are printed for each mechanism."""

SUCCESSORS: Mapping[str, str] = MappingProxyType({"latent-256": "MLA-256"})
"""The mechanism that MHA's weights are converted to where headwise has no conversion to the guide's own."""

REAL: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"MQA": ("mqa", "headwise"), "latent-256": ("mla:0.5", "headwise")}
)
"""The conversions of SmolLM2, which has three key–value heads, that stand for the mechanisms."""


def beside_mha(mechanism: str, metric: str, made: str, hidden_size: int, num_heads: int) -> float:
    """The relative error or the cosine of a layer's output beside MHA's.

    Args:
        mechanism: the layer's name, such as ``GQA-4``.
        metric: the measure of similarity, ``relative_error`` or ``cosine``.
        made: the origin of the weights: ``independent`` initialises each layer on its own, ``converted`` takes MHA's
            random weights.
        hidden_size: E, the width of the layer's input.
        num_heads: the number of query heads.

    Raises:
        UntestableError: headwise has no such conversion.
    """
    name = SUCCESSORS.get(mechanism, mechanism) if made == "converted" else mechanism
    row = run_benchmark(hidden_size, num_heads).row(name, 512)
    found = row.independent if made == "independent" else row.converted
    if found is None:
        raise UntestableError(f"headwise does not convert MHA to {name}")
    value: float = getattr(found, metric)
    return value


def in_real_model(to: str, method: str, metric: str) -> float:
    """The relative error or the cosine of SmolLM2's layers after a conversion, each with the source's inputs."""
    from headwise.study.audit.conversions import layer_similarity

    return layer_similarity(to, method)[metric == "cosine"]


def _checks(mechanism: str, metric: str, printed: str) -> list[Check]:
    what = f"{mechanism}'s {metric.replace('_', ' ')}"
    wide = {"hidden_size": 512, "num_heads": 8}
    checks = [
        Check(
            states=what,
            when=when,
            printed=rounded_number(printed),
            measure=beside_mha,
            inputs={"mechanism": mechanism, "metric": metric, "made": made, **wide},
        )
        for made, when in (
            ("independent", "layers initialised on their own, as the guide's were"),
            ("converted", "converted from MHA with random weights"),
        )
    ]
    if mechanism in REAL:
        to, method = REAL[mechanism]
        checks.append(
            Check(
                states=what,
                when=f"SmolLM2's layers converted to {to}",
                printed=rounded_number(printed),
                measure=in_real_model,
                inputs={"to": to, "method": method, "metric": metric},
            )
        )
    return checks


CLAIMS = (
    Claim(
        id="C12",
        guide="G2",
        says="outputs differ from MHA's by a relative 0.0234 (MQA), 0.0042 (GQA-4), 0.0018 (latent); cosines "
        "0.9989 and more",
        how="outputs of independent layers, of layers converted from MHA's weights, and of SmolLM2's converted "
        "layers",
        checks=tuple(
            check
            for mechanism, printed in PRINTED.items()
            for metric, digits in zip(("relative_error", "cosine"), printed, strict=True)
            for check in _checks(mechanism, metric, digits)
        ),
    ),
)
