"""One malformed input after another for one reader, and what is wrong with how each ends."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.trust.fuzz.campaign import SECONDS
from benchmarks.trust.fuzz.lines import words
from benchmarks.trust.fuzz.mutations import Draw
from benchmarks.trust.fuzz.readers import READERS, Seed

from headwise.errors import HeadwiseError

LONGEST = 2000
"""The most characters of the line that refuses an input."""

MISPLACED = 0.03
"""The share of inputs whose file is no file with other content, but something else."""


class HangError(BaseException):
    """An input took more than `SECONDS`. No ``except Exception`` catches it."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise a HangError in the block after `SECONDS`."""

    def ring(_: int, frame: FrameType | None) -> None:
        raise HangError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def misplace(file: Path, draw: Draw) -> None:
    """Put something else in the place of a file."""
    kind = draw.randrange(8)
    file.unlink()
    if kind == 0:
        file.symlink_to(file)
    elif kind == 1:
        file.symlink_to("/etc/passwd")
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        os.mkfifo(file)
    elif kind == 4:
        file.symlink_to("/dev/zero")
    elif kind == 5:
        file.write_bytes(b"")
    elif kind == 6:
        file.symlink_to("nowhere")


def restore(file: Path, content: bytes) -> None:
    """Put a file back."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    file.write_bytes(content)


class Trial:
    """A reader with its seeds, in a folder.

    Args:
        name: the reader's.
        folder: for the seeds and for what is written.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.reader, self.scratch = name, READERS[name], folder / "scratch"
        self.seeds = list(self.reader.seeds(folder / "seeds"))
        self.whole = {seed: (seed.folder / seed.file).read_bytes() for seed in self.seeds}
        self.others = self._digests(folder / "seeds")
        self.folder = folder
        self.words = words(self.reader.modules)

    def draw(self, number: int, seed: int) -> Draw:
        """What input ``number`` of a run with this seed follows from."""
        draw = Draw(f"{self.name} {seed} {number}")
        draw.words = self.words
        return draw

    def read(self, draw: Draw, content: bytes | None = None) -> dict[str, str] | None:
        """Spoil a file, read it, and put it back; return what is wrong with how that ended, or None.

        Args:
            draw: decides which seed, and how it is spoiled.
            content: what the file is to hold; made from the seed's when None.
        """
        seed = draw.choice(self.seeds)
        file = seed.folder / seed.file
        if content is None and draw.random() < MISPLACED:
            misplace(file, draw)
        else:
            file.write_bytes(seed.spoil(self.whole[seed], draw) if content is None else content)
        self.scratch.mkdir()
        try:
            with limited_time():
                self.reader.read(seed, self.scratch)
            return None
        except HeadwiseError as error:
            line = str(error)
            if len(line) <= LONGEST:
                self.refused = type(error).__name__
                return None
            return self._finding(seed, error, f"a line of {len(line)} characters")
        except (Exception, HangError) as error:
            return self._finding(seed, error, "")
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            restore(file, self.whole[seed])

    refused = ""
    """The kind of the last refusal; emptied by the caller."""

    def changed(self) -> list[str]:
        """The files of the seeds that are no longer what they were."""
        now = self._digests(self.folder / "seeds")
        return sorted(name for name in self.others.keys() | now.keys() if self.others.get(name) != now.get(name))

    @staticmethod
    def _finding(seed: Seed, error: BaseException, what: str) -> dict[str, str]:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "headwise" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
        said = repr(str(error)[:200])
        return {"file": seed.file, "kind": what or type(error).__name__, "place": place, "said": said}

    @staticmethod
    def _digests(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
