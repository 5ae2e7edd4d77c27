"""Find the smallest cache whose loss is allowed: verify, convert, train, verify."""

from headwise.migration.migrate import FILE, Migration, Step, migrate

__all__ = ["FILE", "Migration", "Step", "migrate"]
