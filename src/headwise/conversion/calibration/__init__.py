"""Calibration: evidence for each layer, from a text run through the source, from saved statistics, or from none."""
