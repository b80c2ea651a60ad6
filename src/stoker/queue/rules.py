"""The idle policy as it is kept with a job: only what differs from the usual one, or that there is none."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stoker.errors import BadInputError
from stoker.rules.policy import Policy

Kept = dict[str, str | int | float | bool | None]

OFF: Final[Kept] = {"off": True}


def kept(policy: Policy) -> Kept:
    """What a job keeps of it."""
    usual = msgspec.structs.asdict(Policy())
    return {name: value for name, value in msgspec.structs.asdict(policy).items() if value != usual[name]}


def policy_with(before: Mapping[str, object], rule: Mapping[str, Any]) -> Policy:
    """The policy that was kept, with this put over it. Refuses what cannot be meant."""
    fields = set(Policy.__struct_fields__)
    if unknown := rule.keys() - fields:
        raise BadInputError(f"the idle policy has no {min(unknown)!r}: it has {', '.join(Policy.__struct_fields__)}")
    try:
        policy = msgspec.convert({**{name: before[name] for name in before.keys() & fields}, **rule}, Policy)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the idle policy cannot be so: {error}") from None
    policy.check()
    return policy


def check_kept(policy: Mapping[str, object]) -> None:
    """Refuses what no job could run under."""
    if not policy.get("off"):
        policy_with({}, policy)
