"""The process of one of several ranks that share a layer's heads and count their sums over ranks."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.models.specs import AttentionSpec
from headwise.runtime.attention import build
from headwise.runtime.parallel import share_heads


def share_and_count(rank: int, ranks: int, port: int, spec: AttentionSpec, queue: Any) -> None:
    """Run a layer as one of several ranks; the first one puts the numbers of sums before and after ``o_proj`` begins.

    Args:
        rank: the rank of this process.
        ranks: the number of ranks.
        port: the port at which the ranks meet.
        spec: the spec of the layer.
        queue: the queue that the first rank puts the pair of numbers into.
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.manual_seed(0)
        layer = share_heads(build(spec).eval())
        counts, reduce, is_behind = [0, 0], dist.all_reduce, False

        def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
            counts[is_behind] += 1
            return reduce(tensor, op, group)

        def begins(*_: Any) -> None:
            nonlocal is_behind
            is_behind = True

        layer.get_submodule("o_proj").register_forward_pre_hook(begins)
        dist.all_reduce = counting  # type: ignore[assignment]
        with torch.inference_mode():
            layer(torch.randn(2, 5, layer.spec.hidden_size), is_causal=True)
        dist.all_reduce = reduce
        if rank == 0:
            queue.put(tuple(counts))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
