"""Codes of a converted layer's cache: their basis, scales, bits and bytes."""
