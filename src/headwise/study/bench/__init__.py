"""Benchmarks: implementations of attention timed side by side, beside the limits of the machine."""

from headwise.study.bench.decode import Shape, bench_decode
from headwise.study.bench.generate import bench_generate
from headwise.study.bench.module import bench_module
from headwise.study.bench.prefill import bench_prefill
from headwise.study.bench.report import Bench, Case, Timing, page
