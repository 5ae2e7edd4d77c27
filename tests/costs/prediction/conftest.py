"""The command line's fixtures."""

from tests.cli.conftest import cli, here, refused

__all__ = ["cli", "here", "refused"]
