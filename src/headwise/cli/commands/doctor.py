"""``headwise doctor``: the limits of this machine, and which of headwise's kernels run on it."""

from __future__ import annotations

from rich.markup import escape

from headwise.cli.app import MEASURE, Json, app, emit, out, progress_bar


@app.command(epilog="Example: headwise doctor", rich_help_panel=MEASURE)
def doctor(as_json: Json = False) -> None:
    """Check whether headwise's kernels run on this machine, and measure its limits."""
    with progress_bar() as progress:
        from headwise.measure.timing.machine import doctor as examine

        health = examine(progress=progress)
    if as_json:
        emit(health.to_dict())
        return
    machine = health.machine
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    out.print(
        escape(f"machine   {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads{gpu}"),
        soft_wrap=True,
    )
    peaks = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in health.matmul_flops_per_second.items())
    out.print(f"limits    reading {health.read_bytes_per_second / 1e9:.1f} GB/s; matmul {peaks}", soft_wrap=True)
    kernels = health.kernels
    if kernels["built"]:
        pairs = "by pairs" if kernels["has_pairs"] else "widened"
        out.print(escape(f"kernels   {kernels['reason']}; bfloat16 {pairs}"), soft_wrap=True)
        out.print(escape(f"          {kernels['path']}"), soft_wrap=True)
    else:
        out.print(escape(f"kernels   none: {kernels['reason']}"), soft_wrap=True)
    for name, version in health.versions.items():
        out.print(escape(f"{name:<18}{version or '–'}"))
    for line in health.advice:
        out.print(escape(f"advice    {line}"), soft_wrap=True)
