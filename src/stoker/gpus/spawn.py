"""The start of the helper process, with as few imports as can be: it comes before everything else."""

import os
import sys

PROGRAM = "from stoker.gpus.helper import main; main()"


class Spawned:
    """A helper that was started: its pid, and the pipe ends for questions and answers."""

    __slots__ = ("answers", "pid", "questions", "spec")

    def __init__(self, spec: str, root: str) -> None:
        """Starts it, in a session of its own: what a terminal signals to a person's programs is not for it."""
        asked, self.questions = os.pipe()
        self.answers, told = os.pipe()
        self.spec = spec
        quiet = () if os.environ.get("STOKER_DEBUG") else ((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-c", PROGRAM, spec, root],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, asked, 0),
                    (os.POSIX_SPAWN_DUP2, told, 1),
                    *quiet,
                ],
                setsid=True,
            )
        except OSError:
            os.close(self.questions)
            os.close(self.answers)
            raise
        finally:
            os.close(asked)
            os.close(told)
