"""Cost of several residual streams: what joins n of them before a block, and adds its output to each behind it.

Each attention and each network has n weights to join streams by, n to give its output to them by, and an n by n
matrix to mix them by, all projected from the streams themselves; behind the last layer streams are joined once more.

Source: DeepSeek-V4's report, section 2.2 (manifold-constrained hyper-connections).
"""

from __future__ import annotations


def coefficients(streams: int) -> int:
    """The numbers that a block's streams are joined, given and mixed by, for each token."""
    return (streams + 2) * streams


def parameters(streams: int, hidden_size: int, layers: int) -> int:
    """Weights of a whole model: projections of all streams, biases, and three scales; one at the end."""
    if streams == 1:
        return 0
    block = coefficients(streams) * (streams * hidden_size + 1) + 3
    return 2 * layers * block + streams * (streams * hidden_size + 1) + 1


def block_flops(streams: int, hidden_size: int) -> int:
    """FLOPs of one block for one token: the projection, and mixing the streams."""
    return 2 * streams * hidden_size * (coefficients(streams) + streams)


def flops(streams: int, hidden_size: int, layers: int) -> int:
    """FLOPs of a whole model for one token."""
    if streams == 1:
        return 0
    return 2 * layers * block_flops(streams, hidden_size) + 2 * streams * streams * hidden_size
