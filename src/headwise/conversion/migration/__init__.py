"""Find the smallest cache whose loss is allowed: verify, convert, train, verify."""

from headwise.conversion.migration.migrate import Migration, Step, migrate

__all__ = ["Migration", "Step", "migrate"]
