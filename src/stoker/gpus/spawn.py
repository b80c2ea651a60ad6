"""The start of the helper process, with as few imports as can be: it may come before everything else.

Two ways: `spawned` starts a fresh interpreter, which is safe in any program, also one with threads and open CUDA
devices. `forked` shares the memory of its parent, which must be of one thread and without devices: a supervisor.
"""

import os
import sys

PROGRAM = "from stoker.gpus.helper import main; main()"


class Helper:
    """A helper that was started: its pid, the source it reads, and our ends of the pipes to it."""

    __slots__ = ("answers", "pid", "questions", "spec")

    def __init__(self, spec: str, pid: int, questions: int, answers: int) -> None:
        self.spec = spec
        self.pid = pid
        self.questions = questions
        self.answers = answers


def spawned(spec: str, root: str) -> Helper:
    """A helper in an interpreter and a session of its own: what a terminal signals to programs is not for it."""
    asked, questions, answers, told = _two_pipes()
    quiet = () if os.environ.get("STOKER_DEBUG") else ((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-c", PROGRAM, spec, root],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, asked, 0), (os.POSIX_SPAWN_DUP2, told, 1), *quiet],
            setsid=True,
            setsigmask=(),
        )
    except OSError:
        os.close(questions)
        os.close(answers)
        raise
    finally:
        os.close(asked)
        os.close(told)
    return Helper(spec, pid, questions, answers)


def forked(spec: str, root: str) -> Helper:
    """The same as a fork of this process."""
    asked, questions, answers, told = _two_pipes()
    import gc

    # What lives until now lives on in both: a collection that touched it would copy the pages that they share.
    gc.freeze()
    try:
        pid = os.fork()
    except OSError:
        for descriptor in (asked, questions, answers, told):
            os.close(descriptor)
        raise
    if pid == 0:
        _become_helper(asked, told, spec, root)
    os.close(asked)
    os.close(told)
    return Helper(spec, pid, questions, answers)


def _two_pipes() -> tuple[int, int, int, int]:
    asked, questions = os.pipe()
    try:
        return (asked, questions, *os.pipe())
    except OSError:
        os.close(asked)
        os.close(questions)
        raise


def _become_helper(asked: int, told: int, spec: str, root: str) -> None:
    """Never returns: whatever happens, the child must not go on as its parent."""
    code = 1
    try:
        import signal

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(asked, 0)
        os.dup2(told, 1)
        if not os.environ.get("STOKER_DEBUG"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        from stoker.gpus.helper import serve

        serve(spec, root)
        code = 0
    finally:
        os._exit(code)
