"""The audit of the guides' claims, benchmarks of attention, counters: only the command line imports this wing."""
