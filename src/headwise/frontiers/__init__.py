"""Many ways to make one model's cache smaller: quality against bytes of cache, measured or predicted."""

from headwise.frontiers.points import Frontier, Point
from headwise.frontiers.quick import QuickFrontier, quick_frontier
from headwise.frontiers.run import frontier

__all__ = ["Frontier", "Point", "QuickFrontier", "frontier", "quick_frontier"]
