"""Profiles of this machine, on which predictions for it rest, and a check of these on models not in the profile."""

from headwise.measure.profiling.check import Check, TimePoint, check
from headwise.measure.profiling.measure import measure_curves
from headwise.measure.profiling.profile import Profile, profile, write_profile
