"""The fixtures of the command line and of engines; and a shorter search for the change of a layer."""

import pytest

from headwise.conversion.preparation.change import OFFSETS
from tests.cli.conftest import cli, here, refused
from tests.serving.engines.conftest import interpreter, models

__all__ = ["cli", "here", "interpreter", "models", "refused"]


@pytest.fixture
def few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text: once from each offset, and once from random turns; `test_change.py` asks what more are worth."""
    monkeypatch.setattr("headwise.conversion.preparation.one_layer._STARTS", len(OFFSETS) + 1)
