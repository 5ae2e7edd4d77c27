"""``headwise verify``: whether what headwise wrote is still as it was written."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from headwise.base.tables import bytes_text
from headwise.cli.app import MEASURE, Json, app, emit, out, progress_bar


@app.command(epilog="Example: headwise verify ./half", rich_help_panel=MEASURE)
def verify(
    path: Annotated[str, typer.Argument(help="A folder or a file that headwise wrote.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare a folder or a file with the checksums that it was written with."""
    with progress_bar() as progress:
        from headwise.base.checksums import verify as verify_path

        found = verify_path(path, progress=progress)
    if as_json:
        emit(found.to_dict())
    else:
        lines = {"differs": found.differing, "is missing": found.missing, "is not listed": found.unlisted}
        for what, names in lines.items():
            for name in names:
                out.print(f"{escape(name)} {what}", soft_wrap=True)
        files = f"{found.files} file{'' if found.files == 1 else 's'}, {bytes_text(found.nbytes)}"
        out.print(f"{files}: as written" + ("" if found.is_whole else "; the others above are not"), soft_wrap=True)
    if not found.is_whole:
        raise typer.Exit(1)
