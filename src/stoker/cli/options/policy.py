"""The options of the rules, for every verb that judges GPUs: `--below`, `--for`, `--after` and the rest.

A verb takes them with `@policy_options` and `**rules` in its signature, and makes the policies with
`policies_of(rules)`. A rule states its options where it is registered.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from stoker.actions.catalogue import WITH_ARGUMENT
from stoker.cli.options.common import Typed
from stoker.rules.registry import OFF, SHARED_OPTIONS, RuleType, rule_types
from stoker.rules.rule import Option, Policy
from stoker.units import parse_length

F = TypeVar("F", bound=Callable[..., Any])

OF_JOBS: Final = {"--after": "--idle-after", "--every": "--idle-every"}
"""Alternative flags for verbs whose `--after` and `--every` are about the job."""
LENGTH = Typed("duration", parse_length)


def policy_options(command: F) -> F:
    """Adds the options of all rules, with the defaults of their policies."""
    return policy_options_with()(command)


def policy_options_with(
    *, flags: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None
) -> Callable[[F], F]:
    """The same with other flags (`{"--after": "--idle-after"}`) or defaults (`{"after": 0.0}`)."""

    def decorate(command: F) -> F:
        for option in reversed(list(_options(flags or {}, defaults or {}))):
            command = option(command)
        return command

    return decorate


def _options(flags: Mapping[str, str], defaults: Mapping[str, Any]) -> list[Callable[[F], F]]:
    """In the order in which the help shows them."""
    found: list[Callable[[F], F]] = []
    for rule_type in rule_types():
        if not rule_type.options:
            continue
        keys = {field: key for key, field in rule_type.keys.items()}
        usual = rule_type.policy()
        for option in rule_type.options:
            key = keys[option.field]
            default = defaults.get(key, getattr(usual, option.field))
            found.append(_option(option, key, flags.get(option.flag, option.flag), default))
        found.append(_switch(rule_type))
    return found + [
        _option(o, o.field, flags.get(o.flag, o.flag), defaults.get(o.field, getattr(Policy(), o.field)))
        for o in SHARED_OPTIONS
    ]


def _option(option: Option, key: str, flag: str, default: Any) -> Callable[[F], F]:
    return click.option(
        flag,
        key,
        envvar=f"STOKER_{option.flag.strip('-').replace('-', '_').upper()}",
        type=Typed(option.type_name, option.parse),
        default=OFF if default is None and OFF in option.metavar else default,
        metavar=option.metavar,
        help=f"{option.help} [{option.show(default)}].",
    )


def _switch(rule_type: RuleType) -> Callable[[F], F]:
    return click.option(
        f"--{rule_type.name}",
        type=click.Choice(["on", "off"]),
        default="on" if rule_type.default else "off",
        help=f"off: judge by no {rule_type.name} rule [{'on' if rule_type.default else 'off'}].",
    )


def then_option(text: str) -> Callable[[F], F]:
    """`--then ACTION`, which may be given several times."""
    return click.option("--then", "then", multiple=True, metavar="ACTION", help=text)


def with_joined_actions(words: list[str]) -> list[str]:
    """Turns `--then stop 4242` into `--then 'stop 4242'`, up to the command after `--`."""
    joined: list[str] = []
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        if joined[-1:] == ["--then"] and word in WITH_ARGUMENT and waiting:
            word = f"{word} {waiting.popleft()}"
        joined.append(word)
        if word == "--":
            break
    return [*joined, *waiting]
