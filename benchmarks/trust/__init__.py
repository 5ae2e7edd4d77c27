"""Campaigns that try to make headwise fail: hostile files, kills and other faults, many threads, and long runs.

Each module is one command, `python -m benchmarks.trust.NAME`, whose result is kept in `benchmarks/results/trust` and
stands in `docs/trust.md`. What a campaign has found is mended, and stays as a test of the part that was at fault.
"""
