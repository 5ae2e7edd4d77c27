"""Parameters and FLOPs counted while a module runs: `module` for any module, `other_counters` by other packages,
`layer_comparison` for an attention layer, beside its closed forms.
"""

from headwise.study.counting.layer_comparison import LayerCounts, PeerCount, count_layer, peer_counts
from headwise.study.counting.module import Count, count

__all__ = ["Count", "LayerCounts", "PeerCount", "count", "count_layer", "peer_counts"]
