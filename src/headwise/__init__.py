"""headwise: choose, convert, run and prove attention."""

__version__ = "0.1.0"
