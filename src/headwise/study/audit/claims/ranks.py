"""Claims about attention on several ranks: C25."""

from __future__ import annotations

from functools import cache

from headwise.study.audit.claim import Check, Claim, UntestableError, exact_number
from headwise.study.audit.layers import layer_by_name

SIZES = {"hidden_size": 64, "num_heads": 8, "ranks": 2}


def count_sums(mechanism: str, part: str, hidden_size: int, num_heads: int, ranks: int) -> int:
    """The number of sums over ranks in one forward pass of a layer whose heads are split over them.

    Args:
        mechanism: the layer's name, such as ``GQA-4``.
        part: ``inside`` counts the sums up to the output projection, ``behind`` those from there on.
        hidden_size: E, the width of the layer's input.
        num_heads: the number of query heads.
        ranks: the number of processes, which communicate by gloo.
    """
    return run_and_count(mechanism, hidden_size, num_heads, ranks)[part == "behind"]


@cache
def run_and_count(mechanism: str, hidden_size: int, num_heads: int, ranks: int) -> tuple[int, int]:
    """The numbers of sums inside attention and behind it."""
    from torch import multiprocessing

    from headwise.study.audit.sharing import free_port, share_and_count

    context = multiprocessing.get_context("spawn")
    queue, port, spec = context.SimpleQueue(), free_port(), layer_by_name(mechanism, hidden_size, num_heads)
    processes = [
        context.Process(target=share_and_count, args=(rank, ranks, port, spec, queue)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise UntestableError(f"{ranks} processes could not talk to each other on this machine")
    inside, behind = queue.get()
    return inside, behind


CLAIMS = (
    Claim(
        id="C25",
        guide="G3",
        says="heads split over ranks need no communication inside attention",
        how="sums over two processes, counted in a forward pass of layers whose heads are shared out",
        checks=tuple(
            Check(
                states=f"sums of {mechanism}",
                when=when,
                printed=exact_number(0),
                measure=count_sums,
                inputs={"mechanism": mechanism, "part": part, **SIZES},
            )
            for mechanism in ("MHA", "GQA-4")
            for part, when in (("inside", "inside attention"), ("behind", "with the output projection"))
        ),
    ),
)
