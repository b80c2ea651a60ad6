"""The options that make a policy, shared by every verb that judges GPUs: `--below`, `--for`, `--after` and the rest.

A verb takes them with `@policy_options` and `**rule` in its signature, and makes the policy with `policy_from(**rule)`.
What is typed wrongly is one sentence that names the option, and exit code 2.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from stoker.cli.options.common import Typed
from stoker.errors import BadInputError
from stoker.rules.policy import Policy, Require
from stoker.units import format_duration, format_percent, parse_duration, parse_fraction

F = TypeVar("F", bound=Callable[..., Any])

_OFF: Final = "off"
# Ten years: no machine runs that long, and float arithmetic stays exact far below it.
_LONGEST: Final = 10 * 365 * 86400.0


def _parse_length(text: str) -> float:
    seconds = parse_duration(text)
    if seconds > _LONGEST:
        raise BadInputError(f"{text!r} is longer than any machine runs: write it like 90s, 5m or 1h30m")
    return seconds


def _parse_require(text: str) -> Require:
    written = text.strip().lower()
    if written == "all":
        return "all"
    if written == "any":
        return "any"
    if written.isascii() and written.isdigit() and len(written) < 10 and int(written) >= 1:
        return int(written)
    raise BadInputError(f"{text!r} is not a number of GPUs: write all, any or a number from 1 on")


def _parse_warn_at(text: str) -> float | str:
    return _OFF if text.strip().lower() == _OFF else parse_fraction(text)


LENGTH: Final = Typed("duration", _parse_length)
SHARE: Final = Typed("percentage", parse_fraction)


def policy_options(command: F) -> F:
    """Adds the options of a policy, with the defaults that `Policy` has."""
    return policy_options_with(Policy())(command)


def policy_options_with(defaults: Policy, *, start_up_option: str = "--after") -> Callable[[F], F]:
    """The same for a verb whose people expect another patience, or mean something else by `--after`."""

    def decorate(command: F) -> F:
        for option in reversed(_options(defaults, start_up_option)):
            command = option(command)
        return command

    return decorate


def policy_from(
    *,
    below: float,
    window: float,
    after: float,
    every: float,
    require: Require,
    arm_above: float | None,
    arm_for: float,
    warn_at: float | str | None,
) -> Policy:
    """The policy that these options ask for; one that cannot be meant is refused."""
    policy = Policy(
        below=below,
        window=window,
        after=after,
        every=every,
        require=require,
        arm_above=arm_above,
        arm_for=arm_for,
        warn_at=warn_at if isinstance(warn_at, float) else None,
    )
    policy.check()
    return policy


def _options(defaults: Policy, start_up_option: str) -> list[Callable[[F], F]]:
    """In the order in which the help shows them."""
    armed_above = "always armed" if defaults.arm_above is None else format_percent(defaults.arm_above)
    warn_at = _OFF if defaults.warn_at is None else format_percent(defaults.warn_at)
    return [
        click.option(
            "--below",
            envvar="STOKER_BELOW",
            type=SHARE,
            default=defaults.below,
            metavar="PERCENT",
            help=f"A GPU is idle while its utilization stays below this [{format_percent(defaults.below)}].",
        ),
        click.option(
            "--for",
            "window",
            envvar="STOKER_FOR",
            type=LENGTH,
            default=defaults.window,
            metavar="DURATION",
            help=f"How long it must stay idle without a break [{format_duration(defaults.window)}].",
        ),
        click.option(
            start_up_option,
            "after",
            envvar="STOKER_AFTER",
            type=LENGTH,
            default=defaults.after,
            metavar="DURATION",
            help=f"Start-up delay: the window begins after this [{format_duration(defaults.after)}].",
        ),
        click.option(
            "--every",
            envvar="STOKER_EVERY",
            type=LENGTH,
            default=defaults.every,
            metavar="DURATION",
            help=f"Time between looks [{format_duration(defaults.every)}].",
        ),
        click.option(
            "--require",
            envvar="STOKER_REQUIRE",
            type=Typed("number of GPUs", _parse_require),
            default=defaults.require,
            metavar="all|any|N",
            help=f"How many of the GPUs must be idle [{defaults.require}].",
        ),
        click.option(
            "--arm-above",
            envvar="STOKER_ARM_ABOVE",
            type=SHARE,
            default=defaults.arm_above,
            metavar="PERCENT",
            help=f"Do nothing before some GPU was at or above this once [{armed_above}].",
        ),
        click.option(
            "--arm-for",
            envvar="STOKER_ARM_FOR",
            type=LENGTH,
            default=defaults.arm_for,
            metavar="DURATION",
            help=f"For how long it must have been, in one stretch [{format_duration(defaults.arm_for)}].",
        ),
        click.option(
            "--warn-at",
            envvar="STOKER_WARN_AT",
            type=Typed("percentage", _parse_warn_at),
            default=_OFF if defaults.warn_at is None else defaults.warn_at,
            metavar="PERCENT|off",
            help=f"Warn after this share of the window [{warn_at}].",
        ),
    ]
