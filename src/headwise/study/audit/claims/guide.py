"""The second guide's rules of selection (section 4), beside what its mechanisms cost."""

from __future__ import annotations

import itertools

from headwise import cost
from headwise.study.audit.claim import Check, Claim, at_least, at_most, exact_number
from headwise.study.audit.claims.quality import percent_kept
from headwise.study.audit.claims.speed import run_benchmark
from headwise.study.audit.layers import layer_by_name
from headwise.study.guide import Needs, guide

CONTEXTS = (256, 1024, 4096, 200_000)
PARAMETERS = (10**8, 3 * 10**9, 7 * 10**10)


def percent_disagreeing(heads: int) -> float:
    """The percentage of questions on which two of the guide's rules have no mechanism in common."""
    yes_or_no = itertools.product((False, True), repeat=4)
    questions = [
        Needs(
            context=context,
            heads=heads,
            parameters=parameters,
            accuracy_critical=accuracy,
            extreme_speed=speed,
            memory_limited=memory,
            ample_parameters=ample,
        )
        for context, parameters, (accuracy, speed, memory, ample) in itertools.product(
            CONTEXTS, PARAMETERS, yes_or_no
        )
    ]
    return 100 * sum(bool(guide(one).disagreements) for one in questions) / len(questions)


def cache_ratio(name: str, beside: str, hidden_size: int, num_heads: int) -> float:
    """One layer's cache over another's."""
    one, other = (cost.cache_values(layer_by_name(each, hidden_size, num_heads)) for each in (name, beside))
    return one / other


def best_speedup(mechanism: str, length: int, hidden_size: int, num_heads: int) -> float:
    """The fastest of the other mechanisms' time over a mechanism's."""
    rows = [row for row in run_benchmark(hidden_size, num_heads).rows if row.length == length]
    return min(row.ms for row in rows if row.mechanism != mechanism) / next(
        row.ms for row in rows if row.mechanism == mechanism
    )


WIDE = {"hidden_size": 768, "num_heads": 12}

CLAIMS = (
    Claim(
        id="section 4",
        guide="G2",
        says="a flow, a matrix of lengths and sizes, applications and rules for key–value heads say which "
        "mechanism to take",
        how="the rules followed on every combination of their questions; costs of what they name; MQA's loss",
        checks=(
            Check(
                states="questions on which its rules disagree",
                printed=exact_number(0),
                measure=percent_disagreeing,
                inputs={"heads": 8},
                unit="%",
            ),
            Check(
                states="MQA for extreme speed: no other is faster at 1024 tokens",
                printed=at_least(1, " ×"),
                measure=best_speedup,
                inputs={"mechanism": "MQA", "length": 1024, "hidden_size": 512, "num_heads": 8},
                unit="×",
            ),
            Check(
                states="MHA below 512 tokens: MQA is no faster at 256",
                printed=at_most(1, " ×"),
                measure=lambda length, hidden_size, num_heads: (
                    run_benchmark(hidden_size, num_heads).row("MQA", length).speedup
                ),
                inputs={"length": 256, "hidden_size": 512, "num_heads": 8},
                unit="×",
            ),
            Check(
                states="MQA for little memory: its cache beside GQA-4's",
                printed=at_most(1, " ×"),
                measure=cache_ratio,
                inputs={"name": "MQA", "beside": "GQA-4", "hidden_size": 512, "num_heads": 8},
                unit="×",
            ),
            Check(
                states="latent-256 for very long contexts: its cache beside MQA's",
                printed=at_most(1, " ×"),
                measure=cache_ratio,
                inputs={"name": "latent-256", "beside": "MQA", "hidden_size": 512, "num_heads": 8},
                unit="×",
            ),
            Check(
                states="latent 384 beyond 100K tokens: its cache beside that of MQA, the other choice",
                printed=at_most(1, " ×"),
                measure=cache_ratio,
                inputs={"name": "latent-384", "beside": "MQA", **WIDE},
                unit="×",
            ),
            Check(
                states="GQA of two heads for documents: its cache beside that of serving's three",
                printed=at_most(1, " ×"),
                measure=cache_ratio,
                inputs={"name": "GQA-2", "beside": "GQA-3", **WIDE},
                unit="×",
            ),
            Check(
                states="MQA's loss of 3 to 5 % on mobiles",
                when="SmolLM2's heads aligned and merged, not trained",
                printed=at_least(95, " % kept"),
                measure=percent_kept,
                inputs={"to": "mqa", "method": "headwise"},
                unit="%",
            ),
        ),
    ),
)
