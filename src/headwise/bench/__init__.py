"""Benchmarks: implementations of attention timed side by side, beside the limits of the machine."""

from headwise.bench.decode import Shape, bench_decode
from headwise.bench.generate import bench_generate
from headwise.bench.module import bench_module
from headwise.bench.page import page
from headwise.bench.prefill import bench_prefill
from headwise.bench.report import Bench, Case, Timing

__all__ = [
    "Bench",
    "Case",
    "Shape",
    "Timing",
    "bench_decode",
    "bench_generate",
    "bench_module",
    "bench_prefill",
    "page",
]
