"""Claims about who uses what, and since when: C14 and C15. Facts are in ``published.toml``, with their sources."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from headwise.models.specs import layer_spec
from headwise.study.audit.claim import Check, Claim, UntestableError
from headwise.study.audit.layers import grouped_layer


@cache
def published() -> dict[str, dict[str, Any]]:
    """What papers and configs say, by name."""
    text = files("headwise.study.audit").joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def arxiv_year(paper: str) -> str:
    """The year of a paper on arXiv, from its number. For example ``arxiv_year("mqa")`` is ``"2019"``."""
    return f"20{published()[paper]['arxiv'][:2]}"


def mechanism_of(model: str) -> str:
    """The mechanism of a model, from the catalog or from what was published of it.

    Raises:
        UntestableError: nothing was published.
    """
    entry = published().get(model)
    if entry is None:
        return layer_spec(model).mechanism.upper()
    if "unknown" in entry:
        raise UntestableError(entry["unknown"])
    heads: int = entry["num_heads"]
    return grouped_layer(entry["hidden_size"], heads, entry["num_kv_heads"]).mechanism.upper()


_PRINTED = (
    ("llama-2-7b", "GQA"),
    ("llama-2-70b", "GQA"),
    ("llama-3-8b", "GQA"),
    ("llama-3-70b", "GQA"),
    ("falcon-7b", "MQA"),
    ("falcon-40b", "MQA"),
    ("falcon-180b", "MQA"),
    ("palm-540b", "MQA"),
    ("deepseek-v3", "MLA"),
    ("bert-base", "MHA"),
    ("gpt2", "MHA"),
    ("claude", "GQA"),
)

CLAIMS = (
    Claim(
        id="C14",
        guide="G2",
        says="MQA was proposed by Google in 2023",
        how="the date of Shazeer's paper on arXiv",
        checks=(Check(states="the year", printed="2023", measure=arxiv_year, inputs={"paper": "mqa"}),),
    ),
    Claim(
        id="C15",
        guide="G2",
        says="Llama 2 and 3 use GQA, Falcon-40B and -180B and PaLM MQA, DeepSeek-V3 MLA, BERT and GPT-2 MHA, "
        "Claude GQA",
        how="heads in each model's published config, or in its paper",
        checks=tuple(
            Check(states=model, printed=printed, measure=mechanism_of, inputs={"model": model})
            for model, printed in _PRINTED
        ),
    ),
)
