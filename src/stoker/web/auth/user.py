"""Who asks, once the gate has let them in."""

from typing import Literal, NamedTuple

Role = Literal["viewer", "operator"]


class User(NamedTuple):
    role: Role
    name: str
    """Of the token that they came in with."""
    session: str | None
    """The device's session; None for a program that shows its token with every request."""
    token: str = ""
    """The id of the token: not the secret."""

    @property
    def operates(self) -> bool:
        """Whether they may change something, and so run commands."""
        return self.role == "operator"
