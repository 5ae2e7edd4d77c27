"""A benchmark's report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from headwise.base.documents import web_page
from headwise.measure.timing.machine import machine, versions
from headwise.study.bench.report import OURS, Bench, Case

_STYLE = """
td.best { font-weight: 600; }
td.ours { background: color-mix(in srgb, Highlight 14%, Canvas); }
td .of { color: color-mix(in srgb, CanvasText 55%, Canvas); font-size: .85em; }
td .none { color: color-mix(in srgb, CanvasText 45%, Canvas); }
"""


def page(bench: Bench, command: str) -> str:
    """Make the page: a row for each case, with each way's time and its ratio to the machine's limit.

    For example ``page(bench_prefill(quick=True), "headwise bench prefill --quick")``.

    Args:
        bench: the report.
        command: that made it.
    """
    ways = bench.ways()
    head = "".join(f"<th>{escape(text)}</th>" for text in ("", "limit ms", *ways))
    rows = "".join(f"<tr>{''.join(_cells(case, ways))}</tr>" for case in bench.cases)
    facts = ", ".join(
        f"{escape(str(k))} {escape(str(v))}" for k, v in {**machine(bench.device), **versions()}.items()
    )
    notes = [
        *(f"{way}: {ratio:.1f} × the time of {OURS}, in the median" for way, ratio in bench.speedups().items()),
        *bench.notes,
    ]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return web_page(
        f"headwise bench {bench.kind}",
        f"<p>Milliseconds, medians of interleaved runs, and how many times the machine's limit that is: the larger "
        f"of bytes over the read bandwidth and FLOPs over 0.7 of the matmul peak, both measured beside each case.</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<ul>{listed}</ul><p>{facts}</p><p><code>{escape(command)}</code></p>",
        _STYLE,
    )


def _cells(case: Case, ways: Sequence[str]) -> list[str]:
    times = [timing.ms for timing in case.ways.values() if timing.ms is not None]
    best = min(times) if times else None
    rate = f"{case.read_bytes_per_second / 1e9:.1f} GB/s, {case.matmul_flops_per_second / 1e9:.0f} GFLOP/s"
    cells = [f"<td>{escape(case.name)}</td>", f'<td title="{rate}">{case.limit_ms:.3g}</td>']
    for way in ways:
        timing = case.ways.get(way)
        if timing is None or timing.ms is None:
            why = escape((timing.error if timing else None) or "not timed")
            cells.append(f'<td><span class="none" title="{why}">–</span></td>')
            continue
        names = " ".join(name for name, holds in (("ours", way == OURS), ("best", timing.ms == best)) if holds)
        spread = None if timing.low_ms is None else f"quartiles {timing.low_ms:.3g} – {timing.high_ms:.3g} ms"
        title = "; ".join(part for part in (spread, timing.note) if part)
        ratio = timing.ms / case.limit_ms
        cells.append(
            f'<td class="{names}" title="{escape(title)}">{timing.ms:.3g} <span class="of">{ratio:.2f} ×</span></td>'
        )
    return cells
