"""Fake programs on PATH that record how they were called."""

from pathlib import Path


class StandIns:
    """A directory of programs that is the whole PATH: no test can reach the real ones by accident."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log = directory / "calls"
        directory.mkdir(parents=True)

    @property
    def path(self) -> str:
        return str(self.directory)

    def add(self, name: str, script: str = "exit 0") -> str:
        """A program that writes its call down and goes on with `script`; its path."""
        program = self.directory / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self._log}"\n{script}\n')
        program.chmod(0o755)
        return str(program)

    @property
    def calls(self) -> list[str]:
        """Every call so far: the name and the arguments."""
        return self._log.read_text().splitlines() if self._log.exists() else []
