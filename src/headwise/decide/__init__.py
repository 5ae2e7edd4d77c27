"""Advice, and the pages that show it."""
