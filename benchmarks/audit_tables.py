"""Tables of `headwise audit`, for `benchmarks.tables`."""

from __future__ import annotations

import re
from typing import Any

from headwise.study.audit.training import from_document

Document = dict[str, Any]


def verdicts(document: Document) -> list[list[str]]:
    """Head and rows: each claim, where it is printed, and what was found."""
    rows = [["claim", "printed", "found"]]
    for name, claim in document["claims"].items():
        found = re.sub(
            r"(^|\. )(holds(?: only for)?|wrong|not tested|cannot be tested here)\b", r"\1**\2**", claim["sentence"]
        )
        rows.append([f"{name}, {claim['guide']}", _cell(claim["says"]), _cell(found)])
    return rows


def statements(document: Document) -> list[list[str]]:
    """Head and rows: every statement, as printed and as found."""
    rows = [["claim", "statement", "printed", "found", "holds"]]
    for name, claim in document["claims"].items():
        for one in claim["evidence"]:
            what = f"{one['states']}, {one['when']}" if one["when"] else one["states"]
            holds = {True: "yes", False: "**no**", None: one["reason"]}[one["holds"]]
            rows.append([name, _cell(what), _cell(one["printed"]), _cell(one["shown"]), _cell(holds)])
    return rows


def trained(document: Document) -> list[list[str]]:
    """Head and rows: decoders trained from scratch, beside MHA seed by seed."""
    report = from_document(document)
    rows = [["mechanism", "cache", "parameters", "nats a byte", "less MHA's (95 %)", "kept"]]
    for row in report.rows:
        difference, half = report.beside_mha(row.mechanism)
        is_mha = row.mechanism == "MHA"
        rows.append(
            [
                row.mechanism,
                f"{row.cache_values}",
                f"{row.parameters:,}",
                f"{row.loss:.4f}",
                "" if is_mha else f"{difference:+.4f} ± {half:.4f}",
                "" if is_mha else f"{report.percent_kept(row.mechanism):.1f} %",
            ]
        )
    return rows


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")
