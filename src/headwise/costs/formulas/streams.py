"""Cost of several residual streams: their join before each block, and its output, which is added to each of them.

With n streams, each attention and each network has n weights that join them, n that spread its output over them, and
an n by n matrix that mixes them, all projected from the streams themselves. Behind the last layer the streams are
joined once more.

Source: DeepSeek-V4's report, section 2.2 (manifold-constrained hyper-connections).
"""

from __future__ import annotations


def join_weights(streams: int) -> int:
    """The number of weights that join, feed and mix a block's streams, for each token."""
    return (streams + 2) * streams


def parameters(streams: int, hidden_size: int, layers: int) -> int:
    """The number of weights in a whole model: projections, biases and three scales a block, and the last join."""
    if streams == 1:
        return 0
    block = join_weights(streams) * (streams * hidden_size + 1) + 3
    return 2 * layers * block + streams * (streams * hidden_size + 1) + 1


def block_flops(streams: int, hidden_size: int) -> int:
    """FLOPs of one block for one token: the projection, and mixing the streams."""
    return 2 * streams * hidden_size * (join_weights(streams) + streams)


def flops(streams: int, hidden_size: int, layers: int) -> int:
    """FLOPs of a whole model for one token."""
    if streams == 1:
        return 0
    return 2 * layers * block_flops(streams, hidden_size) + 2 * streams * streams * hidden_size
