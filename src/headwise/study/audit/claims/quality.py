"""Claims about quality: C13 and C23. SmolLM2's conversions test them, and decoders trained from scratch."""

from __future__ import annotations

from headwise.study.audit.claim import Check, Claim, UntestableError, at_least, at_most, printed_range

SAME = 1.01
"""The largest ratio of perplexities, over the source's, that is taken to need no fine-tuning."""


def percent_kept(to: str, method: str) -> float:
    """The source's perplexity as a percentage of a conversion's without any training."""
    from headwise.study.audit.conversions import perplexity

    return 100 * perplexity("own", "") / perplexity(to, method)


def perplexity_ratio(to: str, method: str, beside: tuple[str, str] = ("own", "")) -> float:
    """A conversion's perplexity over another's, or over the source's."""
    from headwise.study.audit.conversions import perplexity

    return perplexity(to, method) / perplexity(*beside)


def kept_from_scratch(mechanism: str) -> float:
    """MHA's perplexity as a percentage of a mechanism's, of decoders of one size trained from scratch.

    Raises:
        UntestableError: none were trained.
    """
    from headwise.study.audit.training import trained_decoders

    return trained_decoders().percent_kept(mechanism)


def refuse_to_measure(why: str) -> bool:
    """A statement that cannot be tested on a machine of this size.

    Raises:
        UntestableError: always, with the reason.
    """
    raise UntestableError(why)


_KEPT = (("MQA", "96", "98"), ("GQA-4", "99", "99.5"), ("GQA-2", "98", "99"), ("latent", "99.5", "100"))
_LONG = "no decoder here is trained on sequences long enough to show a decay"
_LARGE = "needs several models of several billions of parameters, trained"

CLAIMS = (
    Claim(
        id="C13",
        guide="G2",
        says="quality kept beside MHA: MQA 96–98 %, GQA-4 99–99.5 %, GQA-2 98–99 %, latent 99.5–100 %; MQA needs "
        "fine-tuning, GQA and MLA do not; on long sequences MHA decays most, MLA least",
        how="the perplexity of SmolLM2's conversions without training, and of decoders trained from scratch "
        "(--train)",
        checks=(
            *(
                Check(
                    states=f"MQA keeps {low} to {high} %",
                    when=when,
                    printed=printed_range(low, high, suffix=" %"),
                    measure=percent_kept,
                    inputs={"to": "mqa", "method": method},
                    unit="%",
                )
                for name, low, high in _KEPT[:1]
                for method, when in (
                    ("mean", "SmolLM2's three heads pooled into one"),
                    ("headwise", "SmolLM2's three heads aligned and merged"),
                )
            ),
            Check(
                states="latent attention keeps 99.5 to 100 %",
                when="SmolLM2 converted to MLA at half of its cache",
                printed=printed_range("99.5", "100", suffix=" %"),
                measure=percent_kept,
                inputs={"to": "mla:0.5", "method": "headwise"},
                unit="%",
            ),
            *(
                Check(
                    states=f"{name} keeps {low} to {high} %",
                    when="decoders trained from scratch",
                    printed=printed_range(low, high, suffix=" %"),
                    measure=kept_from_scratch,
                    inputs={"mechanism": name},
                    unit="%",
                )
                for name, low, high in _KEPT
            ),
            Check(
                states="MQA needs fine-tuning",
                printed=at_least(SAME, " × the perplexity"),
                measure=perplexity_ratio,
                inputs={"to": "mqa", "method": "headwise"},
                unit="×",
            ),
            Check(
                states="MLA needs no fine-tuning",
                when="half of SmolLM2's cache",
                printed=at_most(SAME, " × the perplexity"),
                measure=perplexity_ratio,
                inputs={"to": "mla:0.5", "method": "headwise"},
                unit="×",
            ),
            Check(states="decay on long sequences", printed=True, measure=refuse_to_measure, inputs={"why": _LONG}),
        ),
    ),
    Claim(
        id="C23",
        guide="G3",
        says="mean pooling beats picking one head and random initialisation; MQA trains unstably and hurts large "
        "models most",
        how="the perplexity of SmolLM2 with one key–value head, before any training",
        checks=(
            *(
                Check(
                    states=f"mean pooling beats {name}",
                    printed=at_most(1, " × the perplexity"),
                    measure=perplexity_ratio,
                    inputs={"to": "mqa", "method": "mean", "beside": ("mqa", method)},
                    unit="×",
                )
                for name, method in (("the first head", "first_head"), ("random heads", "random"))
            ),
            Check(
                states="mean pooling beats heads that were aligned first",
                printed=at_most(1, " × the perplexity"),
                measure=perplexity_ratio,
                inputs={"to": "mqa", "method": "mean", "beside": ("mqa", "headwise")},
                unit="×",
            ),
            Check(states="MQA trains unstably", printed=True, measure=refuse_to_measure, inputs={"why": _LARGE}),
            Check(
                states="MQA hurts large models most", printed=True, measure=refuse_to_measure, inputs={"why": _LARGE}
            ),
        ),
    ),
)
