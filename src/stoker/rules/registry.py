"""The registry of rules, with policies, options and stored form. A new rule is a module and a `RuleType`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.rules.idle import IDLE_OPTIONS, IdlePolicy, IdleRule
from stoker.rules.rule import LOOK_TAKES, Option, Policy, Rule, Stored, Verdict, duration_option
from stoker.rules.samples import SamplesPolicy, SamplesRule
from stoker.rules.sentinel import SentinelPolicy, SentinelRule
from stoker.rules.stalled import STALLED_OPTIONS, StalledPolicy, StalledRule
from stoker.units import format_percent, parse_fraction

OFF: Final = "off"
# Settings shared by all rules of a run: there is one loop, and one kind of warning.
SHARED: Final = tuple(Policy.__struct_fields__)
SHARED_OPTIONS: Final = (
    duration_option("--every", "every", "Time between looks"),
    Option(
        "--warn-at",
        "warn_at",
        "percentage",
        lambda text: OFF if text.strip().lower() == OFF else parse_fraction(text),
        "PERCENT|off",
        "Warn after this share of the window",
        lambda share: OFF if share is None else format_percent(share),
    ),
)


class RuleType(NamedTuple):
    """A kind of rule."""

    name: str
    policy: type[Policy]
    """Every field has a default."""
    begin: Callable[[Any, float, float], Rule]
    """Creates the rule from its policy, its start time, and the maximum duration of a look."""
    options: tuple[Option, ...] = ()
    """Its options of `run`, `watch`, `replay`, `submit` and `edit`; without any it is not offered there."""
    default: bool = True
    """It applies to every job that does not turn it off."""
    prefix: str | None = None
    """The prefix of its settings in the stored form; None for its name."""

    @property
    def keys(self) -> dict[str, str]:
        """The fields of its policy by key in the stored form, without shared ones."""
        prefix = f"{self.name}_" if self.prefix is None else self.prefix
        return {prefix + field: field for field in self.policy.__struct_fields__ if field not in SHARED}


_TYPES: Final[dict[str, RuleType]] = {}


def register(rule_type: RuleType) -> None:
    """Registers a rule for all verbs, queued jobs and `replay`."""
    _TYPES[rule_type.name] = rule_type


register(RuleType("idle", IdlePolicy, IdleRule, IDLE_OPTIONS, prefix=""))
register(RuleType("stalled", StalledPolicy, StalledRule, STALLED_OPTIONS))
register(RuleType("samples", SamplesPolicy, SamplesRule, default=False))
register(RuleType("sentinel", SentinelPolicy, SentinelRule, default=False))


def rule_types() -> tuple[RuleType, ...]:
    return tuple(_TYPES.values())


def type_of(policy: Policy) -> RuleType:
    return next(one for one in _TYPES.values() if one.policy is type(policy))


def begin_rule(policy: Policy, begun: float, look_takes: float = LOOK_TAKES) -> Rule:
    policy.check()
    return type_of(policy).begin(policy, begun, look_takes)


def setting_keys() -> tuple[str, ...]:
    """All keys of the stored form."""
    return (*SHARED, *(key for one in _TYPES.values() for key in (one.name, *one.keys)))


def policies_of(stored: Mapping[str, object]) -> tuple[Policy, ...]:
    """The policies in a stored form. Raises `BadInputError` for unknown or invalid settings."""
    if unknown := stored.keys() - set(setting_keys()):
        offered = [key for one in _TYPES.values() if one.options for key in (one.name, *one.keys)]
        raise BadInputError(f"no rule has a setting {min(unknown)!r}: there are {', '.join((*SHARED, *offered))}")
    shared = {field: stored[field] for field in SHARED if field in stored}
    found = []
    for one in _TYPES.values():
        if _is_on(one, stored):
            own = {field: stored[key] for key, field in one.keys.items() if key in stored}
            found.append(_policy(one, {**shared, **own}))
    return tuple(found)


def stored_form(policies: Iterable[Policy], *, whole: bool = False) -> Stored:
    """The flat form of these policies. `whole`: including defaults."""
    by_type = {type(policy): policy for policy in policies}
    stored: Stored = {}
    for one in _TYPES.values():
        policy = by_type.get(one.policy)
        if (policy is not None) != one.default:
            stored[one.name] = policy is not None
        if policy is None:
            continue
        usual = one.policy()
        for key, field in (*((field, field) for field in SHARED), *one.keys.items()):
            value = getattr(policy, field)
            if whole or value != getattr(usual, field):
                stored[key] = value
    return stored


def changed(stored: Mapping[str, object], changes: Mapping[str, object]) -> Stored:
    """The stored form with these changes. Changing a setting of a rule turns it on, unless it is also turned off."""
    on = {one.name: True for one in _TYPES.values() if one.keys.keys() & changes.keys()}
    return stored_form(policies_of({**stored, **on, **changes}))


def in_words(policies: Iterable[Policy]) -> str:
    return "; or ".join(policy.in_words() for policy in policies) or "no rule"


def fired_in_words(policies: Iterable[Policy], verdict: Verdict) -> str:
    """A description of the rule of a verdict, or of all rules if that is unknown."""
    known = tuple(policies)
    return in_words([policy for policy in known if type_of(policy).name == verdict.rule] or known)


def conditions(policies: Iterable[Policy]) -> list[str]:
    return [condition for policy in policies for condition in policy.conditions()]


def _is_on(one: RuleType, stored: Mapping[str, object]) -> bool:
    said = stored.get(one.name, one.default)
    if said in (True, "on"):
        return True
    if said in (False, OFF):
        return False
    raise BadInputError(f"{one.name}: {said!r} is neither on nor off")


def _policy(one: RuleType, values: Mapping[str, object]) -> Policy:
    try:
        plain = {field: None if value == OFF else value for field, value in values.items()}
        policy = msgspec.convert(plain, one.policy)
    except msgspec.ValidationError as error:
        raise BadInputError(f"the settings of the rule {one.name!r} are not valid: {error}") from None
    policy.check()
    return policy
