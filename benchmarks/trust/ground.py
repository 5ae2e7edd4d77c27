"""The folder in which runs of one case are made to fail, and what must hold in it after each of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust.cases import Case, content, hashes
from benchmarks.trust.runs import Ended, Fault, Run

_TAKEN = ("exists and is not empty", "exists; say --overwrite")
"""What a command says of an output that is there: its last run was ended after it had been moved into its place."""


class Ground:
    """The folder of one case, with the undisturbed output.

    Args:
        case: the case.
        folder: the folder, which has ``inputs``.

    Attributes:
        seconds: how long the undisturbed run took.
        operations: its operations on files, in order.
        findings: what was found wrong, in words.
        compared: how many outputs were compared with the undisturbed one.

    Raises:
        RuntimeError: the undisturbed run failed, or a second one differs.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.output = case, folder, folder / case.output
        self.findings: list[str] = []
        self.compared = 0
        self._hashes = self._hash()
        self._expected: dict[str, bytes] = {}
        for attempt in range(2):  # the first one reads files from the disk
            ended = self.run()
            if ended.status != 0:
                raise RuntimeError(f"{case.words}: status {ended.status}, {ended.err}")
            found = content(self.output)
            if attempt and found != self._expected:
                raise RuntimeError(f"{case.words}: two outputs differ in {_differing(found, self._expected)}")
            self._expected, self.seconds, self.operations = found, ended.seconds, ended.operations
            self._remove_output()

    def run(self, *faults: Fault, **options: Any) -> Ended:
        """Run the command to its end."""
        return self.start(*faults, **options).end()

    def start(self, *faults: Fault, **options: Any) -> Run:
        """Begin to run the command."""
        return Run(self.case.words, self.folder, faults, **options)

    @property
    def is_done(self) -> bool:
        """Whether all of the output is under its final name."""
        return all((self.output / name).exists() for name in self.case.whole or ("",))

    def check(self, said: str) -> None:
        """Look at inputs and output after a run that was made to fail; what is wrong becomes a finding.

        Args:
            said: what was done to the run.
        """
        if (now := self._hash()) != self._hashes:
            self.findings.append(f"{said}: inputs changed: {_differing(now, self._hashes)}")
        if not self.output.exists():
            return
        found = content(self.output)
        wrong = [name for name in found if found[name] != self._expected.get(name) and self._is_final(name)]
        if not self.case.whole:
            wrong += [name for name in self._expected if name not in found]
        if wrong:
            self.findings.append(f"{said}: the output has its name and is wrong in {wrong}")

    def go_on(self, said: str) -> Ended:
        """Run the command to its end, compare the output, and remove it; what is wrong becomes a finding."""
        ended = self.run()
        is_there = ended.status == 2 and self.is_done and any(words in ended.err for words in _TAKEN)
        if ended.status != 0 and not is_there:
            self.findings.append(
                f"{said}: the same command does not go on: {ended.status}, {ended.err.strip()[-500:]}"
            )
        elif (found := content(self.output)) != self._expected:
            self.findings.append(f"{said}: the output differs in {_differing(found, self._expected)}")
        else:
            self.compared += 1
        self._remove_output()
        if (now := self._hash()) != self._hashes:
            self.findings.append(f"{said}: inputs changed: {_differing(now, self._hashes)}")
        left = sorted(path.name for path in self.folder.iterdir() if path.name != "inputs")
        if left:
            self.findings.append(f"{said}: left behind: {left}")
            self.clear()
        return ended

    def clear(self) -> None:
        """Remove everything but the inputs."""
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != "inputs":
                shutil.rmtree(path)
            elif path.name != "inputs":
                path.unlink()

    def clear_work(self) -> None:
        """Remove the working folders."""
        for path in self.folder.glob(".*"):
            shutil.rmtree(path)

    def _is_final(self, name: str) -> bool:
        """Whether a file of the output must be right when it is there; an output that is a file is ``.``."""
        return name == "." or not (name.startswith(".") or Path(name).name.startswith(".") or name.endswith(".new"))

    def _hash(self) -> dict[str, str]:
        return hashes(self.folder / "inputs", real=self.case.real)

    def _remove_output(self) -> None:
        if self.output.is_dir():
            shutil.rmtree(self.output)
        else:
            self.output.unlink(missing_ok=True)
        self.output.with_name(f"{self.output.name}.sha256").unlink(missing_ok=True)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Sequence[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
