"""A snapshot of a commit that a job runs from, so that the person can go on editing: a worktree of git."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stoker.errors import StokerError
from stoker.paths import try_lock
from stoker.program import ProgramResult, run_program

# A checkout of a large repository over a network takes minutes; one that takes longer than this hangs.
_TIMEOUT: Final = 300.0
# It is held for moments.
_LONGEST_WAIT: Final = 30.0
_PAUSE: Final = 0.02
# Submodules stay empty, and no daemon is left behind to watch a directory that is soon gone.
_OPTIONS: Final = ("-c", "submodule.recurse=false", "-c", "core.fsmonitor=false")


class Worktree(NamedTuple):
    """A checkout of one commit beside the repository."""

    repository: str
    """Where git keeps what all worktrees share."""
    at: Path
    directory: str
    """The place in it that is the job's directory."""

    @classmethod
    def create(cls, directory: str, commit: str, at: Path, check: Callable[[], None] = lambda: None) -> "Worktree":
        """Checks the commit out at `at`, which must not exist, from the repository that the directory is in.

        `check` is called repeatedly meanwhile, and raises when the job is to stop.
        """
        repository, inside = _repository_of(directory)
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        if not found.ok:
            raise StokerError(
                f"commit {commit} is not in the repository of {directory}: `git fetch` there may bring it"
            )
        worktree = cls(repository, at, str(at / inside))
        worktree._add(commit, found.out, check)
        if not Path(worktree.directory).is_dir():
            worktree.remove()
            raise StokerError(f"{directory} is not part of commit {commit}: commit it, or submit without --pin")
        return worktree

    def remove(self) -> None:
        """Takes the checkout away with everything that was written into it; what cannot be deleted stays."""
        shutil.rmtree(self.at, ignore_errors=True)
        with _alone(self.repository):
            if not _git(self.repository, "worktree", "remove", "--force", "--force", str(self.at)).ok:
                _git(self.repository, "worktree", "prune")

    def _add(self, commit: str, resolved: str, check: Callable[[], None]) -> None:
        if self.at.exists():
            raise StokerError(f"no snapshot of commit {commit} can be made at {self.at}: something is there already")
        with _alone(self.repository):
            done = _git(self.repository, "worktree", "add", "--no-checkout", "--detach", str(self.at), resolved)
        # Without the lock: the files may take minutes.
        if done.ok:
            try:
                done = _run(("-C", str(self.at), "reset", "--quiet", "--hard"), check)
            except BaseException:
                self.remove()
                raise
        if not done.ok:
            self.remove()
            raise StokerError(f"no snapshot of commit {commit} can be made at {self.at}: {done.complaint}")


@contextlib.contextmanager
def _alone(repository: str) -> Iterator[None]:
    """Keeps others of us from adding and removing at the same time: git stumbles over a worktree that is half made.

    Where the file system has no such lock, or it is not released in time, it goes on without.
    """
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + _LONGEST_WAIT
        with contextlib.suppress(OSError):
            while not try_lock(descriptor) and time.monotonic() < until:
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _repository_of(directory: str) -> tuple[str, str]:
    """What all worktrees of the repository share, and the place of the directory inside its worktree."""
    if not Path(directory).is_dir():
        raise StokerError(f"the directory {directory} does not exist here, so no snapshot of it can be made")
    shown = _run(("-C", directory, "rev-parse", "--path-format=absolute", "--git-common-dir", "--show-prefix"))
    if not shown.ok:
        raise StokerError(f"no snapshot of {directory} can be made: {shown.complaint}")
    repository, _, inside = shown.out.partition("\n")
    return repository, inside


def _git(repository: str, *words: str) -> ProgramResult:
    return _run((f"--git-dir={repository}", *words))


def _run(words: Sequence[str], check: Callable[[], None] | None = None) -> ProgramResult:
    # A worker may itself be started from a hook, whose variables name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    answer = run_program(("git", *_OPTIONS, *words), environment, _TIMEOUT, check)
    # The first thing that git calls an error; its advice comes after that.
    errors = [line.strip() for line in answer.errors.splitlines() if line.strip().startswith(("fatal: ", "error: "))]
    complaint = (errors or [answer.complaint])[0].removeprefix("fatal: ").removeprefix("error: ")
    return answer._replace(out=answer.out.removesuffix("\n"), complaint=complaint)
