"""The fixtures of the command line and of engines."""

from tests.cli.conftest import cli, here, refused
from tests.serving.engines.conftest import interpreter, models

__all__ = ["cli", "here", "interpreter", "models", "refused"]
