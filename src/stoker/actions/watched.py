"""The GPUs that are watched: what a person chose, refused where the rules could never act on it."""

from collections.abc import Mapping, Sequence

from stoker.errors import BadInputError
from stoker.gpus.model import Look
from stoker.rules.rule import Observation, Policy
from stoker.rules.scope import MachineScope


class Watched:
    """Chosen for good at the first look that could be read, and checked then."""

    def __init__(self, chosen: str, policies: Sequence[Policy], environment: Mapping[str, str]) -> None:
        self._chosen = chosen
        self._policies = policies
        self._scope = MachineScope(chosen, environment)
        self._checked = False

    def observe(self, look: Look) -> Observation:
        """Raises `BadInputError`, at the first look that could be read, for a choice that cannot work."""
        observation = self._scope.observe(look)
        if not self._checked and look.problem is None:
            self._checked = True
            if not observation.activities:
                raise BadInputError(f"--gpus {self._chosen}: there is no such GPU here")
            for policy in self._policies:
                policy.check_gpus(len(observation.activities))
        return observation
