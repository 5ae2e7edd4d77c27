"""Tests of `headwise.decide.advice`."""
