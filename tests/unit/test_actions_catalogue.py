"""Parsing of --then and of policy options."""

from typing import Any

import click
import pytest

from stoker.actions.catalogue import ActionSettings, Exit, parse_action
from stoker.actions.command import Exec
from stoker.actions.stop import Stop
from stoker.cli.options.policy import policy_options, policy_options_with
from stoker.errors import BadInputError
from stoker.rules.idle import IdlePolicy
from stoker.rules.registry import policies_of, stored_form
from stoker.rules.rule import Policy

MEANS = ActionSettings(environment={})


@pytest.mark.parametrize(
    ("typed", "does"),
    [
        ("stop 4242", "stop process 4242 and everything it started"),
        ("exit", "exit"),
        ("EXIT ", "exit"),
        ("shutdown", "shut this machine down"),
        ("reboot", "reboot this machine"),
        ("exec echo idle", "run `echo idle`"),
        ("exec 'echo idle'", "run `echo idle`"),
        ('exec "echo idle"', "run `echo idle`"),
        ("exec 'my program' --now", "run `'my program' --now`"),
        ("exec echo 'it is idle'", "run `echo 'it is idle'`"),
        ("exec echo don't", "run `echo don't`"),
        ("notify ntfy://host/secret", "notify by ntfy://"),
    ],
)
def test_action_describes_itself(typed: str, does: str) -> None:
    assert parse_action(typed, MEANS).describe() == does


def test_action_is_found_by_name() -> None:
    assert isinstance(parse_action("exit", MEANS), Exit)
    assert isinstance(parse_action("stop 1", MEANS), Stop)
    assert isinstance(parse_action("exec true", MEANS), Exec)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("explode", "'explode' is not an action: use 'stop PID', exit, shutdown"),
        ("", "'' is not an action"),
        ("stop", "'stop' needs the pid of a process"),
        ("stop python", "'stop' needs the pid of a process, as in 'stop 4242', not 'python'"),
        ("stop 0", "'stop' needs the pid"),
        ("stop -1", "'stop' needs the pid"),
        ("stop 99999999999999999999", "'stop' needs the pid"),
        ("stop ٤", "'stop' needs the pid"),
        ("exec", "'exec' needs a command"),
        ("notify", "'notify' needs a URL"),
        ("shutdown now", "'shutdown' takes no argument, and 'now' was given"),
        ("determined 7", "'determined' takes no argument"),
    ],
)
def test_invalid_action_is_refused_with_one_message(typed: str, sentence: str) -> None:
    with pytest.raises(BadInputError, match=r"^--then: ") as error:
        parse_action(typed, MEANS)
    assert sentence in str(error.value)


def test_webhook_url_is_left_out_of_the_error() -> None:
    with pytest.raises(BadInputError) as error:
        parse_action("slack://T0KEN/B0B/S3CRET", MEANS)
    assert "T0KEN" not in str(error.value)
    assert "S3CRET" not in str(error.value)


@click.command()
@policy_options
def judge(**rules: Any) -> Policy:
    policy, _stalled = policies_of(rules)
    return policy


def policy(*typed: str) -> IdlePolicy:
    result = judge.main(list(typed), standalone_mode=False)
    assert isinstance(result, IdlePolicy)
    return result


def test_policy_without_options_has_the_defaults() -> None:
    assert policy() == IdlePolicy()


def test_every_option_reaches_the_policy() -> None:
    typed = "--below 20% --for 2h --after 0 --every 250ms --require 3 --arm-above 0.8 --arm-for 1m30s --warn-at 75%"
    assert policy(*typed.split()) == IdlePolicy(
        below=0.2, window=7200, after=0, every=0.25, require=3, arm_above=0.8, arm_for=90, warn_at=0.75
    )


@pytest.mark.parametrize("word", ["all", "any", "ANY"])
def test_all_and_any_are_accepted_by_name(word: str) -> None:
    assert policy("--require", word).require == word.lower()


def test_warnings_can_be_disabled() -> None:
    assert policy("--warn-at", "off").warn_at is None


def test_verb_overrides_the_defaults() -> None:
    hasty = IdlePolicy(unused_for=0.0, window=60, every=1, after=0, warn_at=None)

    @click.command()
    @policy_options_with(defaults=stored_form([hasty], whole=True))
    def judge_hastily(**rules: Any) -> tuple[Policy, ...]:
        return policies_of(rules)

    assert judge_hastily.main([], standalone_mode=False)[0] == hasty


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--below 0%", "--below 0% would never or always be idle"),
        ("--below 120%", "--below: '120%' is out of range"),
        ("--below -5%", "--below: '-5%' is out of range"),
        ("--below nan%", "--below: 'nan%' is out of range"),
        ("--below much", "--below: 'much' is not a percentage"),
        ("--for 0", "must be greater than zero"),
        ("--for -5s", "--for: '-5s' is not a duration"),
        ("--for 99999d", "--for: '99999d' is longer than any machine runs"),
        ("--for 1s --every 10s", "not a single look would fit into the window"),
        ("--every 0s", "must be greater than zero"),
        ("--require 0", "--require: '0' is not a number of GPUs"),
        ("--require most", "--require: 'most' is not a number of GPUs: write all, any or a number"),
        ("--arm-for 5s", "--arm-for needs --arm-above"),
        ("--arm-above 0%", "is not a level of activity"),
        ("--warn-at 100%", "--warn-at must be between 0% and 100%"),
        ("--warn-at soon", "--warn-at: 'soon' is not a percentage"),
    ],
)
def test_invalid_options_are_refused(typed: str, sentence: str) -> None:
    with pytest.raises(BadInputError) as error:
        policy(*typed.split())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
