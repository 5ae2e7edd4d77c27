"""The ``headwise`` command: one thin file a subcommand."""

from headwise.cli.main import main

__all__ = ["main"]
