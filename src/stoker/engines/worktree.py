"""A git worktree of one commit that a job runs from, so that its owner can keep editing."""

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

# A checkout of a large repository over a network takes minutes, but no longer than this.
_TIMEOUT: Final = 300.0
# Holders of the lock keep it for moments.
_LOCK_TIMEOUT: Final = 30.0
_PAUSE: Final = 0.02
# Submodules stay empty, and no daemon watches a temporary directory.
_OPTIONS: Final = ("-c", "submodule.recurse=false", "-c", "core.fsmonitor=false")


class Worktree(NamedTuple):
    """A checkout of one commit beside the repository."""

    repository: str
    """Git's common directory of all worktrees."""
    at: Path
    directory: str
    """The job's directory inside the worktree."""

    @classmethod
    def create(cls, directory: str, commit: str, at: Path, check: Callable[[], None] = lambda: None) -> "Worktree":
        """Checks out the commit from the directory's repository. The path `at` must not exist.

        `check` is called repeatedly, and raises to stop the job.
        """
        repository, inside = _repository_of(directory)
        resolved = _git(repository, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        if not resolved.ok:
            raise StokerError(
                f"commit {commit} is not in the repository of {directory}: `git fetch` there may bring it"
            )
        worktree = cls(repository, at, str(at / inside))
        worktree._add(commit, resolved.out, check)
        if not Path(worktree.directory).is_dir():
            worktree.remove()
            raise StokerError(f"{directory} is not part of commit {commit}: commit it, or submit without --pin")
        return worktree

    def remove(self) -> None:
        """Removes the checkout and all files written into it, as far as they can be deleted."""
        shutil.rmtree(self.at, ignore_errors=True)
        with _locked(self.repository):
            if not _git(self.repository, "worktree", "remove", "--force", "--force", str(self.at)).ok:
                _git(self.repository, "worktree", "prune")

    def _add(self, commit: str, resolved: str, check: Callable[[], None]) -> None:
        if self.at.exists():
            raise StokerError(f"no snapshot of commit {commit} can be made at {self.at}: something is there already")
        with _locked(self.repository):
            done = _git(self.repository, "worktree", "add", "--no-checkout", "--detach", str(self.at), resolved)
        # Writing the files may take minutes, so it happens without the lock.
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
def _locked(repository: str) -> Iterator[None]:
    """Serializes adding and removing worktrees: git fails on a half-made one.

    If the file system has no locks, or the lock stays held too long, this continues without it.
    """
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + _LOCK_TIMEOUT
        with contextlib.suppress(OSError):
            while not try_lock(descriptor) and time.monotonic() < until:
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _repository_of(directory: str) -> tuple[str, str]:
    """Git's common directory, and the path of the directory inside its worktree."""
    if not Path(directory).is_dir():
        raise StokerError(f"the directory {directory} does not exist here, so no snapshot of it can be made")
    paths = _run(("-C", directory, "rev-parse", "--path-format=absolute", "--git-common-dir", "--show-prefix"))
    if not paths.ok:
        raise StokerError(f"no snapshot of {directory} can be made: {paths.complaint}")
    repository, _, inside = paths.out.partition("\n")
    return repository, inside


def _git(repository: str, *words: str) -> ProgramResult:
    return _run((f"--git-dir={repository}", *words))


def _run(words: Sequence[str], check: Callable[[], None] | None = None) -> ProgramResult:
    # A git hook may have started the worker, and its variables name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    answer = run_program(("git", *_OPTIONS, *words), environment, _TIMEOUT, check)
    # Git prints the error first and advice after it.
    errors = [line.strip() for line in answer.errors.splitlines() if line.strip().startswith(("fatal: ", "error: "))]
    complaint = (errors or [answer.complaint])[0].removeprefix("fatal: ").removeprefix("error: ")
    return answer._replace(out=answer.out.removesuffix("\n"), complaint=complaint)
