"""The GPUs that are watched: what a person chose, refused where the rule could never be fulfilled with it."""

from collections.abc import Mapping, Sequence

from stoker.errors import BadInputError
from stoker.gpus.model import Look
from stoker.rules.policy import Policy
from stoker.rules.scope import MachineScope
from stoker.rules.verdict import Activity


class Watched:
    """Chosen for good at the first look that could be read, and checked then."""

    def __init__(self, chosen: str, policy: Policy, environment: Mapping[str, str]) -> None:
        self._chosen = chosen
        self._policy = policy
        self._scope = MachineScope(chosen, environment)
        self._checked = False

    def activities(self, look: Look) -> list[Activity]:
        """Raises `BadInputError`, at the first look that could be read, for a choice that cannot be meant."""
        activities = self._scope.activities(look)
        if not self._checked and look.problem is None:
            self._check(activities)
            self._checked = True
        return activities

    def _check(self, activities: Sequence[Activity]) -> None:
        if not activities:
            raise BadInputError(f"--gpus {self._chosen}: there is no such GPU here")
        required = self._policy.require
        if isinstance(required, int) and required > len(activities):
            raise BadInputError(f"--require {required} can never be: only {len(activities)} GPU(s) are watched")
