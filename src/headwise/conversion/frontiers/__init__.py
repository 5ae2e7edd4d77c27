"""Many ways to make one model's cache smaller: quality against bytes of cache, measured or predicted."""

from headwise.conversion.frontiers.points import Frontier, Point
from headwise.conversion.frontiers.quick import QuickFrontier, quick_frontier
from headwise.conversion.frontiers.run import frontier
