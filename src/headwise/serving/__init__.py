"""Engines: which of them takes what, folders and files that they load, and what their caches cost."""
