"""Costs as answers: one model inspected, mechanisms compared, one layer stage by stage."""
