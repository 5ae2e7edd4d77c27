"""Attention to keys and values in codes of whole numbers."""
