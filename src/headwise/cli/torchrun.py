"""Several processes behind one command line, as ``torchrun -m headwise`` starts them: they speak with one voice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from headwise.cli.app import StoppedError, err
from headwise.errors import HeadwiseError

_FAILED = "headwise/failed"
_WAIT = timedelta(days=2)
"""A layer's solution may take the first process long; one that has died is noticed at once, by its connection."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """Share the block's work with the other processes, where torchrun has started several.

    The first process alone prints. Of all that fail, the first to fail says why, and all end with its status: 2 for
    bad input, 1 for a failure. torchrun stops all as soon as one has ended: one that is already failing, and may be
    the one to say why, is left to end by itself.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if int(os.environ["RANK"]) > 0:
        err.quiet = True
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
    store, rank, world = next(rendezvous("env://", timeout=_WAIT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_WAIT)
    ending = False

    def stop(*_: object) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        ending = True
        own = f"{rank} {_status(error)}"
        with suppress(RuntimeError):  # torchrun itself, which keeps the store, may be gone
            if (first := store.compare_set(_FAILED, "", own).decode()) != own:  # another has failed, and said so
                sys.exit(int(first.split()[1]))
        if isinstance(error, RuntimeError) and _is_lost(error):
            sys.stderr.write("headwise: another process of this run was ended; the same command goes on from there\n")
            sys.exit(1)
        raise
    else:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)


def _status(error: BaseException) -> int:
    """What a process ends with that fails so."""
    return (
        2 if isinstance(error, HeadwiseError) else 130 if isinstance(error, KeyboardInterrupt | StoppedError) else 1
    )


def _is_lost(error: RuntimeError) -> bool:
    """Whether the connection to another process broke."""
    return any(word in str(error) for word in ("gloo", "Connection", "closed"))
