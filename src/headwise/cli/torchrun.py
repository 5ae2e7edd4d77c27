"""Run a command in the processes that ``torchrun -m headwise`` starts, with one output and one exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwise.cli.app import StoppedError, err
from headwise.errors import HeadwiseError

_FAILED = "headwise/failed"
_LOST = "headwise: another process of this run was ended; the same command continues from there"
_PATIENCE = 10
"""Seconds that a process has to end by itself; torchrun kills it after thirty."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """Run the block as one of torchrun's processes; without torchrun, simply run it.

    Only the first process prints results. The process that fails first prints its error, and all end with its
    status: 2 for bad input, 1 for a failure. torchrun stops all processes as soon as one has ended; a process that is
    already failing ignores that, because it may be the one that has to print the error.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from headwise.base.processes import WAIT

    if int(os.environ["RANK"]) > 0:
        err.quiet = True
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        os.dup2(sys.stdout.fileno(), 1)  # native code prints there
    store, process, world = next(rendezvous("env://", timeout=WAIT))
    dist.init_process_group("gloo", store=store, rank=process, world_size=world, timeout=WAIT)
    ending = False

    def stop(*_: object) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    watch = _watch(store, process, lambda: ending)
    try:
        yield
    except BaseException as error:
        ending = True
        failure = f"{process} {_status(error)}"
        with suppress(RuntimeError):  # torchrun, which keeps the store, may have ended
            if (first := store.compare_set(_FAILED, "", failure).decode()) != failure:  # another prints its error
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
        os.close(watch)


def _watch(store: Any, process: int, is_ending: Callable[[], bool]) -> int:
    """End this process some seconds after SIGTERM if Python's signal handler has not run by then.

    The handler cannot run while the main thread is in a library that waits for a process which has ended.

    Returns:
        The writing end of a pipe; closing it stops the watch.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)

    def watch() -> None:
        while (received := os.read(reading, 1)) and received[0] != signal.SIGTERM:
            pass
        if not received:
            os.close(reading)
            return
        time.sleep(_PATIENCE)
        if is_ending():
            return
        failure = f"{process} 1"
        with suppress(RuntimeError):
            if (first := store.compare_set(_FAILED, "", failure).decode()) != failure:
                os._exit(int(first.split()[1]))
        err.file.write(f"{_LOST}\n")  # stderr itself is held back
        err.file.flush()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return writing


def _status(error: BaseException) -> int:
    """The exit status of a process that fails with an error."""
    return (
        2 if isinstance(error, HeadwiseError) else 130 if isinstance(error, KeyboardInterrupt | StoppedError) else 1
    )


def _is_lost(error: RuntimeError) -> bool:
    """Whether an error says that the connection to another process broke."""
    return any(word in str(error) for word in ("gloo", "Connection", "closed"))
