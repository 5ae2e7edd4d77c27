"""What a conversion measured of itself, as a file of its folder that `headwise advise --measured` reads."""

from __future__ import annotations

import json

from headwise.base.documents import finite
from headwise.base.options import ConvertOptions
from headwise.conversion.planning.plan import ConversionPlan
from headwise.conversion.report import Conversion
from headwise.costs.formulas.model import cache_bytes_per_token
from headwise.costs.formulas.target import Target


def measured_json(plan: ConversionPlan, target: Target, options: ConvertOptions, report: Conversion) -> str | None:
    """A frontier's JSON with one point, this conversion's; None where nothing was measured, or it has no spelling.

    A conversion by another method than headwise's whole one, or into another format, says so in ``way``: its quality
    is not that of the target by itself.
    """
    evaluation = report.evaluation
    if evaluation is None or target.spelling is None:
        return None
    # Codes are compared with the source's cache in bfloat16, and numbers with numbers of the same dtype.
    whole = cache_bytes_per_token(plan.before) if report.coded else report.kv_bytes_per_token_before
    others = [f"by {report.method}"] if options.method else []
    others += [f"without {', '.join(options.without)}"] if options.without else []
    others += [f"as {report.format}"] if report.format != "headwise" else []
    point = {
        "target": target.spelling,
        "way": " ".join(("headwise", *others)),
        "label": report.label,
        "cache_fraction": report.kv_bytes_per_token_after / whole,
        "perplexity_ratio": evaluation.perplexity_ratio,
        "kl": evaluation.kl,
    }
    document = {
        "label": plan.before.label,
        "tokens": evaluation.tokens,
        "window": evaluation.window,
        "points": [point],
    }
    return json.dumps(finite(document), indent=1) + "\n"
