"""Malformed files by the ten thousand for everything that headwise reads; `__main__` is the campaign."""
