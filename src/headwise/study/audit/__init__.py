"""The audit of the guides' claims by formulas, counters, timings, conversions and trained models."""

from headwise.study.audit.audit import Audit, audit
from headwise.study.audit.claim import Check, Claim, Judged, Result, Verdict
from headwise.study.audit.claims import all_claims
from headwise.study.audit.mechanisms import MechanismBench, MechanismRow, Similarity, bench_mechanisms
