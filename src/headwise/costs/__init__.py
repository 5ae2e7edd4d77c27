"""Parameters, FLOPs, bytes and time, computed from specs without torch."""
