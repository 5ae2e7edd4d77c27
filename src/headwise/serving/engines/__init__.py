"""Which engines load a model, why others refuse it, what to write for them instead, and what their caches cost."""

from headwise.costs.prediction import RUNNABLE
from headwise.serving.engines.in_engine import evaluate_in_engine, evaluate_windows_in_engine
from headwise.serving.engines.rules import ENGINE_RULES, Engine, EngineReport, ModelFacts, Verdict, engines
