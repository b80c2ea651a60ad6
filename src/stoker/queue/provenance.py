"""The origin of a submission: user, directory, commit and Python environment."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stoker.errors import BadInputError

if TYPE_CHECKING:
    from stoker.queue.code.packing import PackedCode

# Variables that a virtualenv or conda environment sets or depends on.
KEPT: Final = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "PYTHONPATH")
# On a dead file server, a job without its commit is better than a hanging submission.
GIT_SECONDS: Final = 3.0
# A pinned job needs its commit.
GIT_SECONDS_TO_PIN: Final = 60.0


class Checkout(NamedTuple):
    """A directory's commit, and whether tracked files differ from it; or why that is unknown."""

    commit: str | None = None
    dirty: bool | None = None
    problem: str = ""


def login_name() -> str:
    """The login name; empty if the user has none, as in some containers."""
    try:
        import getpass

        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def checkout_of(directory: str, *, to_pin: bool = False) -> Checkout:
    """Runs git without its locks and its file monitor, since a commit may be in progress."""
    from stoker.program import NOT_RUN, run_program

    question = ("-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    seconds = GIT_SECONDS_TO_PIN if to_pin else GIT_SECONDS
    done = run_program(("git", "--no-optional-locks", "-C", directory, *question), os.environ, seconds)
    if done.code == NOT_RUN:
        return Checkout(problem=done.complaint)
    if not done.ok:
        return Checkout(problem=f"{directory} is not in a git repository that can be read")
    lines = done.out.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return Checkout(problem=f"the git repository of {directory} has no commit yet")
    return Checkout(commits[0], dirty=any(not line.startswith("#") for line in lines))


def submitted_from(
    directory: str | None,
    variables: Mapping[str, str],
    *,
    bare: bool = False,
    pin: bool = False,
    allow_dirty: bool = False,
    packed: "PackedCode | None" = None,
) -> dict[str, Any]:
    """The fields of a job for directory, environment, code and submitter.

    `bare`: without the variables of the active virtualenv or conda environment. `packed`: a snapshot of the code.
    """
    environment = {**({} if bare else kept_environment()), **variables}
    check_environment(environment)
    where = working_directory(directory)
    found = checkout_of(where, to_pin=pin) if packed is None else Checkout(packed.commit, packed.code.changed > 0)
    if pin and packed is not None:
        raise BadInputError("a job runs a commit or a snapshot: leave out --pin or --snapshot")
    if pin and found.commit is None:
        raise BadInputError(f"a pinned job needs a commit to run: {found.problem}")
    if pin and found.dirty and not allow_dirty:
        raise BadInputError(
            f"a pinned job runs what is committed, and {where} has changes that are not: commit them, or leave them "
            "out with --allow-dirty"
        )
    return {
        "directory": where,
        "environment": environment,
        "commit": found.commit,
        "dirty": found.dirty,
        "code": packed.code if packed is not None else None,
        "submitter": login_name(),
    }


def working_directory(chosen: str | None = None) -> str:
    """The directory as an absolute path. An absolute one need not exist here: the worker's machine may have it."""
    if chosen is None:
        return _here()
    path = Path(chosen).expanduser()
    absolute = path if path.is_absolute() else Path(_here()) / path
    try:
        if absolute.is_dir():
            return str(absolute.resolve() if ".." in absolute.parts else absolute)
        there = absolute.exists()
    except (OSError, ValueError) as error:
        raise BadInputError(f"{chosen[:60]!a} cannot be the directory of a job: {error}") from None
    if there or not path.is_absolute():
        what = "is not a directory" if there else "is not there"
        raise BadInputError(f"{absolute} {what}: a job needs one to start in")
    return str(absolute)


def kept_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the active virtualenv or conda environment, if any."""
    if not (environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")):
        return {}
    return {name: environment[name] for name in KEPT if environment.get(name)}


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuses variables that cannot be passed to a program or stored."""
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise BadInputError(f"the variable {name!a} cannot be set: no program could be given it")
        try:
            (name + value).encode()
        except UnicodeEncodeError:
            raise BadInputError(
                f"the variable {name!a} is not text in UTF-8, so it cannot be kept with a job "
                "(--bare-env leaves out what an active Python environment sets)"
            ) from None


def _here() -> str:
    """The current directory with symbolic links as in the shell: their targets may not exist on other machines."""
    try:
        actual = Path.cwd()
    except FileNotFoundError:
        raise BadInputError("this directory was removed: go to another one, or name the job's by --directory") from None
    with contextlib.suppress(OSError, ValueError):
        called = Path(os.environ.get("PWD", ""))
        if called.is_absolute() and ".." not in called.parts and called.samefile(actual):
            return str(called)
    return str(actual)
