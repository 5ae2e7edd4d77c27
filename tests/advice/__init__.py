"""Tests of `headwise.advice`."""
