"""An error is one line of a bounded length, whatever a file has in the place of a name, a value or a rule."""

from __future__ import annotations

import copy
import pickle

from headwise.errors import CheckpointError


def test_a_line_is_short_whatever_a_file_names() -> None:
    for field, value, rule in (("x" * 9000, 1, "r"), ("f", ["x" * 9000], "r"), ("f", 1, "r" * 9000)):
        error = CheckpointError(field, value, rule)
        assert len(str(error)) < 2000
        assert (error.field, error.value, error.rule) == (field, value, rule)
        assert str(copy.copy(error)) == str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(CheckpointError("vocab_size", -1, "must be positive")) == "vocab_size = -1: must be positive"
