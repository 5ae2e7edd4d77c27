"""Kernels of caches of codes: attention over them, and the encoder of the trellis."""
