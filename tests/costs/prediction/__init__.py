"""Predicted time, memory and capacity."""
