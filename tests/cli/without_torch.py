"""Commands that answer without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def answered_without_torch(*arguments: str) -> Any:
    """The JSON that a command prints in a process that imports neither torch nor transformers."""
    program = (
        "import sys; from headwise.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    command = [sys.executable, "-c", program, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
