"""Tables of `headwise audit`, for `benchmarks.tables`."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def verdicts(document: Document) -> list[list[str]]:
    """Head and rows: each claim, where it is printed, and what was found."""
    rows = [["claim", "printed", "found"]]
    for name, claim in document["claims"].items():
        rows.append(
            [f"{name}, {claim['guide']}", _cell(claim["says"]), _cell(f"**{claim['verdict']}**. {claim['sentence']}")]
        )
    return rows


def statements(document: Document) -> list[list[str]]:
    """Head and rows: every statement, as printed and as found."""
    rows = [["claim", "statement", "printed", "found", "holds"]]
    for name, claim in document["claims"].items():
        for one in claim["evidence"]:
            what = f"{one['states']}, {one['when']}" if one["when"] else one["states"]
            holds = {True: "yes", False: "**no**", None: one["reason"]}[one["holds"]]
            rows.append([name, _cell(what), _cell(one["printed"]), _cell(_found(one)), _cell(holds)])
    return rows


def trained(document: Document) -> list[list[str]]:
    """Head and rows: decoders trained from scratch, beside MHA seed by seed."""
    from headwise.audit.training import FromScratch, Trained

    decoders = [Trained(**{**row, "losses": tuple(row["losses"])}) for row in document["rows"].values()]
    settings = document["settings"]
    report = FromScratch(tokens=settings["tokens"], text=settings["text"], rows=tuple(decoders))
    rows = [["mechanism", "cache", "parameters", "nats a byte", "less MHA's (95 %)", "kept"]]
    for row in decoders:
        difference, half = report.beside_mha(row.mechanism)
        is_mha = row.mechanism == "MHA"
        rows.append(
            [
                row.mechanism,
                f"{row.cache_values}",
                f"{row.parameters:,}",
                f"{sum(row.losses) / len(row.losses):.4f}",
                "" if is_mha else f"{difference:+.4f} ± {half:.4f}",
                "" if is_mha else f"{report.kept(row.mechanism):.1f} %",
            ]
        )
    return rows


def _found(one: Document) -> str:
    found = one["found"]
    if found is None:
        return "not tested"
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, str):
        return found
    text = f"{found:,.0f}" if float(found).is_integer() else f"{found:.4g}"
    return f"{text} {one['unit']}".strip()


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")
