"""Coding new tokens: their gains, and the trellis codes of their values."""
