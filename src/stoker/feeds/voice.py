"""What a feed tells people: its jobs on stdout, everything else on stderr, and nothing of that twice."""

import sys


class Voice:
    """Every line is flushed at once: somebody may read it through a pipe."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def job(self, job: str, command: str) -> None:
        """A job that this feed has put into the queue."""
        sys.stdout.write(f"{job}  {' '.join(command.splitlines())}\n")
        sys.stdout.flush()

    def say(self, sentence: str) -> None:
        sys.stderr.write(f"stoker: {sentence}\n")
        sys.stderr.flush()

    def say_once(self, sentence: str) -> None:
        """The same sentence is told once for the whole life of the feed."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)
