"""The fixtures of the command line and of engines; and a shorter search for the change of a layer."""

import pytest

from tests.cli.conftest import cli, here, refused
from tests.serving.engines.conftest import interpreter, models

__all__ = ["cli", "here", "interpreter", "models", "refused"]


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest search, on fewer keys; `test_change.py` and `test_loss.py` ask what it finds in full."""
    place = "headwise.conversion.preparation"
    monkeypatch.setattr(f"{place}.change.KEYS", 64)
    monkeypatch.setattr(f"{place}.change.STEPS", 30)
    monkeypatch.setattr(f"{place}.change.OFFSETS", (0.0,))
    monkeypatch.setattr(f"{place}.one_layer.OFFSETS", (0.0,))
    monkeypatch.setattr(f"{place}.one_layer._STARTS", 2)  # on a text: once from no turns, and once from random ones
