"""Tables of healing, for `benchmarks.tables`."""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from headwise.conversion.healing.report import late_slope

Document = dict[str, Any]


def healing(document: Document) -> list[list[str]]:
    """Head and rows: what was trained, each text's ratio and divergence, and the slope at the end."""
    texts = [score["text"] for score in next(iter(document["rows"].values()))["evaluation"]["texts"]]
    rows = [["model", "trained on", *texts, "slope"]]
    for name, row in document["rows"].items():
        if name.startswith("own"):
            continue
        rows.append([*_named(name, row), *_scores(row), _slope(row)])
    return rows


def tasks(*documents: Document) -> list[list[str]]:
    """Head and rows: the questions answered of PIQA, and the facts found at each depth of a long context."""
    rows_of_all = chain.from_iterable(document["rows"].items() for document in documents)
    known = [(name, row) for name, row in rows_of_all if "choices" in row and "planted" in row]
    depths = [depth["depth"] for depth in known[0][1]["planted"]["depths"]]
    rows = [["model", "trained on", "PIQA", *(f"at {depth:g}" for depth in depths)]]
    for name, row in known:
        trials = row["planted"]["trials"]
        found = [f"{depth['found'] * trials:.0f} of {trials}" for depth in row["planted"]["depths"]]
        rows.append([*_named(name, row), f"{row['choices']['accuracy']['rate']:.1%}", *found])
    return rows


def tuning(document: Document) -> list[list[str]]:
    """Head and rows: what was trained with what, and the held-out loss before and at its lowest."""
    rows = [["model", "trained on", "held-out loss", "lowest"]]
    for name, row in document["rows"].items():
        losses = [loss for _, loss in row["healing"]["held_out"]]
        rows.append([*_named(name, row), f"{losses[0]:.3f}", f"{min(losses):.3f}"])
    return rows


def healed(*documents: Document) -> list[list[str]]:
    """Head and rows: half of the values untrained, and after the longest training on the texts of each document."""
    known = [
        [row for name, row in document["rows"].items() if name.startswith("mla:0.5 of ")] for document in documents
    ]
    untrained = next(row for row in known[0] if "healing" not in row)
    texts = [score["text"] for score in untrained["evaluation"]["texts"]]
    calibrated = f"calibrated on {documents[0]['settings']['calibration_tokens']:,} tokens"
    rows = [["half of the values cached, without codes", *texts], [calibrated, *_scores(untrained)]]
    for of_texts in known:
        longest = max((row for row in of_texts if "healing" in row), key=lambda row: row["healing"]["tokens"])
        report = longest["healing"]
        weight = report.get("objective_settings", {}).get("text_weight")
        words = f"then trained on {report['tokens']:,} tokens of {len(report['texts'])} texts"
        words += f" in {report['seconds'] / 3600:.1f} h" + ("" if weight is None else f", `--text-weight {weight:g}`")
        rows.append([words, *_scores(longest)])
    return rows


def migration(document: Document) -> list[list[str]]:
    """Head and rows: every size that was tried for each allowed loss, and what it lost."""
    rows = [["allowed", "size", "healed", "cache, bytes a token", "of the source's", "loss", "KL"]]
    for name, row in document["rows"].items():
        for step in row["migration"]["steps"]:
            held = step["cache_bytes_per_token"]
            part = held / row["migration"]["cache_bytes_per_token"]
            healed = "yes" if step["healed"] else "no"
            losses = f"{step['loss']:.1%}", f"{step['kl']:.3f}"
            rows.append([f"{float(name):.0%}", f"`{step['target']}`", healed, f"{held:,.0f}", f"{part:.1%}", *losses])
    return rows


def uptraining(document: Document) -> list[list[str]]:
    """Head and rows: how heads were merged, and the ratio of perplexities before and after with each seed."""
    rows = [["heads", "merged by", "cache, bytes a token", "before", "after, median", "after, lowest to highest"]]
    for name, row in document["rows"].items():
        target, method, *rates = name.split()
        rate = "".join(f", rate {rate.partition('=')[2]}" for rate in rates)
        after = row["after"]
        span = f"×{_ratio(min(after))} to ×{_ratio(max(after))}"
        median = f"×{_ratio(statistics.median(after))}"
        rows.append(
            [f"`{target}`", f"`{method}`{rate}", f"{row['bytes']:g}", f"×{_ratio(row['before'])}", median, span]
        )
    return rows


def _scores(row: Document) -> list[str]:
    """Each text's ratio of perplexity, and the divergence in nats."""
    return [f"×{_ratio(score['perplexity_ratio'])} ({score['kl']:.3f})" for score in row["evaluation"]["texts"]]


def _named(name: str, row: Document) -> list[str]:
    """The model and what it was trained on, of a row's name such as ``mla:0.5 of 200000 by mean batch=4``."""
    target, _, rest = name.partition(" of ")
    words = rest.split()[1:]
    method = f" by {words[words.index('by') + 1]}" if "by" in words else ""
    shown = {"learning_rate": "rate", "objective": "", "train": "", "optimizer": ""}
    settings = []
    for word in words:
        key, has_value, value = word.partition("=")
        if has_value and key not in ("measurements", "patience"):
            settings.append(f"{shown.get(key, key)} {value}".strip())
    tokens = f"{row['healing']['tokens']:,} tokens" if "healing" in row else "not trained"
    return [f"`{target}`{method}", ", ".join([tokens, *settings])]


def _slope(row: Document) -> str:
    """The slope at the end, which rows of earlier versions keep in another unit."""
    if "healing" not in row:
        return ""
    healing = row["healing"]
    tokens = healing["batch"] * healing["window"]
    slope = late_slope(healing["held_out"], healing["steps"], tokens)
    return "" if slope is None else f"{slope:+.4f}"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.0f}"
