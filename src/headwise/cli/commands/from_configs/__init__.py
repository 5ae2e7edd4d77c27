"""Commands that read configs and results alone, and need no torch."""
