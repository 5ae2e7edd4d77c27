"""Measurements: windows of texts, models beside their references, times of this machine."""
