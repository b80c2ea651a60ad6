"""The action `exit`: the watcher itself ends, and its exit code says why. Scripts go on from there."""

from stoker.actions.action import Action, Facts


class Exit(Action):
    """Nothing to do but end, which the watcher does after its last action."""

    patience = 1.0

    def describe(self) -> str:
        return "exit"

    def prepare(self) -> tuple[str, ...]:
        return ()

    def act(self, facts: Facts) -> None:
        """The watcher ends by itself."""
