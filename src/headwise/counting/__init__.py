"""Parameters and FLOPs counted while a module runs, by headwise and by other counters."""

from headwise.counting.count import Count, count
from headwise.counting.layer import LayerCounts, count_layer
from headwise.counting.peers import PeerCount, peer_counts

__all__ = ["Count", "LayerCounts", "PeerCount", "count", "count_layer", "peer_counts"]
