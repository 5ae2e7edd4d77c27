"""The guides' audit, benchmarks of attention, counters: only the command line imports it."""
