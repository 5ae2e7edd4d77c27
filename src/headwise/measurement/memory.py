"""How much memory this process has taken."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """The most resident memory the process has had so far, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
