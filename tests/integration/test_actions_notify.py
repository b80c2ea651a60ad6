"""Messages to people by apprise, to a receiver on loopback."""

import socket
import sys

import pytest

from stoker.actions.action import ActionError, Facts
from stoker.actions.notify import Notify
from stoker.errors import BadInputError
from tests.support.http_receiver import Answer, Receiver

FACTS = Facts(
    kind="idle",
    cause="its GPUs stayed idle",
    reason="GPU 0 stayed below 1% for 30m",
    rule="all GPUs below 1% for 30m",
    gpus=(),
    seconds=1800,
    host="node7",
)


# Apprise gives a receiver four seconds to answer, unless configured otherwise.
PATIENTLY = "cto=60&rto=60"


def test_message_has_host_and_reason() -> None:
    with Receiver().listening() as receiver:
        action = Notify(f"json://127.0.0.1:{receiver.port}/hook?{PATIENTLY}")
        assert action.prepare() == ()
        assert receiver.asked == []
        action.act(FACTS)
        [asked] = receiver.asked
        assert asked.json()["title"] == "node7: its GPUs stayed idle"
        assert asked.json()["type"] == "warning"
        assert asked.json()["message"] == "GPU 0 stayed below 1% for 30m (rule: all GPUs below 1% for 30m)."


def test_warnings_are_sent() -> None:
    with Receiver().listening() as receiver:
        action = Notify(f"json://127.0.0.1:{receiver.port}/hook?{PATIENTLY}")
        action.prepare()
        action.send_message("node7", "GPU 0 cannot be read")
        [asked] = receiver.asked
        assert asked.json()["message"] == "GPU 0 cannot be read."


def test_failed_delivery_is_reported_without_the_url(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Receiver(Answer(403)).listening() as receiver:
        action = Notify(f"json://alice:hunter22@127.0.0.1:{receiver.port}/t0psecret?token=s3same&{PATIENTLY}")
        action.prepare()
        with pytest.raises(ActionError) as failed:
            action.act(FACTS)
    sentence = str(failed.value)
    assert sentence.startswith("the message by json:// was not delivered")
    assert "403" in sentence
    shown = sentence + action.describe() + "".join(capfd.readouterr())
    for secret in ("alice", "hunter22", "t0psecret", "s3same", str(receiver.port)):
        assert secret not in shown


def test_unreachable_receiver_is_a_failure() -> None:
    with socket.socket() as silent:  # bound, so that nobody else gets the port, and never listening
        silent.bind(("127.0.0.1", 0))
        action = Notify(f"json://127.0.0.1:{silent.getsockname()[1]}/hook")
        action.prepare()
        with pytest.raises(ActionError, match="was not delivered"):
            action.act(FACTS)


@pytest.mark.parametrize("url", ["nonsense://t0psecret", "t0psecret", "json:/t0psecret"])
def test_url_unknown_to_apprise_is_refused_at_startup(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInputError, match="is not a URL that apprise understands") as refused:
        Notify(url).prepare()
    assert "t0psecret" not in str(refused.value) + "".join(capfd.readouterr())


def test_missing_apprise_is_reported_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ActionError, match=r"pip install 'stoker\[notify\]'"):
        Notify("json://127.0.0.1/hook").prepare()
