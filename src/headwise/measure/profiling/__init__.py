"""Measure this machine, so that predictions for it are measured ones; and check them on models never measured."""

from headwise.measure.profiling.check import Check, Point, check
from headwise.measure.profiling.measure import measure_curves
from headwise.measure.profiling.profile import Profile, profile, write_profile

__all__ = ["Check", "Point", "Profile", "check", "measure_curves", "profile", "write_profile"]
