"""An audit as one self-contained HTML page."""

from __future__ import annotations

from html import escape

from headwise.base.documents import web_page
from headwise.measure.timing.machine import machine, versions
from headwise.study.audit.audit import Audit
from headwise.study.audit.check import Result
from headwise.study.audit.claim import Judged

_STYLE = """
td, th { vertical-align: top; }
td:nth-child(n+2) { text-align: left; }
.verdict { font-weight: 600; white-space: nowrap; }
.no { font-weight: 600; }
details { margin: .6em 0; }
"""


def page(audit: Audit, command: str) -> str:
    """Make the page: a row for each claim with its verdict, and below every statement with what was found.

    For example ``page(audit(["C14"]), "headwise audit --claim C14")``.

    Args:
        audit: the audit.
        command: that made it.
    """
    rows = "".join(
        f'<tr><td><a href="#{_anchor(judged)}">{escape(judged.claim.id)}</a></td><td>{escape(judged.claim.says)}</td>'
        f'<td class="verdict">{escape(judged.verdict)}</td></tr>'
        for judged in audit.claims
    )
    facts = ", ".join(f"{escape(str(k))} {escape(str(v))}" for k, v in {**machine("cpu"), **versions()}.items())
    return web_page(
        "headwise audit",
        "<p>What five guides to attention mechanisms print, and what is so. A verdict follows from its statements: a "
        "number passes if it differs by no more than a unit of the last digit that is printed.</p>"
        f'<div class="wide"><table><thead><tr><th>claim</th><th>printed</th><th>verdict</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f"{''.join(map(_evidence, audit.claims))}<p>{facts}; {audit.seconds:.0f} s</p>"
        f"<p><code>{escape(command)}</code></p>",
        _STYLE,
    )


def _anchor(judged: Judged) -> str:
    return judged.claim.id.replace(" ", "-")


def _evidence(judged: Judged) -> str:
    claim = judged.claim
    rows = "".join(map(_row, judged.results))
    return (
        f'<details id="{_anchor(judged)}" open><summary><b>{escape(claim.id)}</b>, {escape(claim.guide)}: '
        f"{escape(claim.says)}</summary><p>{escape(claim.how)}. <b>{escape(judged.sentence)}.</b></p>"
        '<div class="wide"><table><thead><tr><th>statement</th><th>printed</th><th>found</th><th>holds</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div></details>"
    )


def _row(result: Result) -> str:
    holds = {True: "yes", False: "no", None: escape(result.reason)}[result.holds]
    mark = ' class="no"' if result.holds is False else ""
    cells = (escape(result.name), escape(result.printed), escape(result.shown))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}<td{mark}>{holds}</td></tr>"
