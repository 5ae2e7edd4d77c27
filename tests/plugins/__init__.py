"""Plugins for engines: what of them needs no engine."""
