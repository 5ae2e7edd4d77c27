"""Which engines load a model, why others refuse it, and what to write for them instead."""

from headwise.engines.check import EngineReport, Verdict, engines
from headwise.engines.facts import ModelFacts
from headwise.engines.rules import ENGINES, Engine

__all__ = ["ENGINES", "Engine", "EngineReport", "ModelFacts", "Verdict", "engines"]
