"""Several processes behind one command line, as ``torchrun -m headwise`` starts them: they speak with one voice."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from headwise.cli.app import StoppedError, err
from headwise.errors import HeadwiseError

_FAILED = "headwise/failed"
_LOST = "headwise: another process of this run was ended; the same command goes on from there"
_PATIENCE = 10
"""Seconds to end by itself; torchrun kills after thirty."""
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
    tells = _watch(store, rank, lambda: ending)
    try:
        yield
    except BaseException as error:
        ending = True
        own = f"{rank} {_status(error)}"
        with suppress(RuntimeError):  # torchrun itself, which keeps the store, may be gone
            if (first := store.compare_set(_FAILED, "", own).decode()) != own:  # another has failed, and said so
                sys.exit(int(first.split()[1]))
        if isinstance(error, RuntimeError) and _is_lost(error):
            sys.stderr.write(f"{_LOST}\n")
            sys.exit(1)
        raise
    else:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)
    finally:
        signal.set_wakeup_fd(-1)
        os.close(tells)


def _watch(store: Any, rank: int, is_ending: Callable[[], bool]) -> int:
    """End this process some seconds after SIGTERM where Python's own handler has not run.

    A library in which the main thread waits, for a process that is no more, lets no handler run.

    Returns:
        The end of a pipe that is to be closed when nobody needs watching any more.
    """
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells)

    def watch() -> None:
        while (got := os.read(told, 1)) and got[0] != signal.SIGTERM:
            pass
        if not got:
            os.close(told)
            return
        time.sleep(_PATIENCE)
        if is_ending():
            return
        own = f"{rank} 1"
        with suppress(RuntimeError):
            if (first := store.compare_set(_FAILED, "", own).decode()) != own:
                os._exit(int(first.split()[1]))
        err.file.write(f"{_LOST}\n")  # stderr itself is held back
        err.file.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return tells


def _status(error: BaseException) -> int:
    """What a process ends with that fails so."""
    return (
        2 if isinstance(error, HeadwiseError) else 130 if isinstance(error, KeyboardInterrupt | StoppedError) else 1
    )


def _is_lost(error: RuntimeError) -> bool:
    """Whether the connection to another process broke."""
    return any(word in str(error) for word in ("gloo", "Connection", "closed"))
