"""Parameters and FLOPs counted while a module runs: `module` counts any module, `layer_comparison` an attention layer
beside its closed forms and the counts of other packages.
"""

from headwise.study.counting.layer_comparison import LayerCounts, PeerCount, count_layer, peer_counts
from headwise.study.counting.module import Count, count
