"""Spread one total of cached values over layers."""
