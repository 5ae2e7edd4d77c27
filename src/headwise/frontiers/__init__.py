"""Many ways to make one model's cache smaller, each evaluated: quality against bytes of cache."""

from headwise.frontiers.points import Frontier, Point
from headwise.frontiers.run import frontier

__all__ = ["Frontier", "Point", "frontier"]
