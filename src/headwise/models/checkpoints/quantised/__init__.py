"""Folders of quantised weights: read through their scales, and changed by rows without a code lost."""
