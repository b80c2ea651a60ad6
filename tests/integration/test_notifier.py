"""Events of a real queue are sent once, by webhook and mail, even with several notifiers and failing services."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stoker.actions.notify import AppriseChannel
from stoker.errors import BadInputError
from stoker.notifications.notifier import Notifier
from stoker.notifications.watch import QueueWatch
from stoker.queue import JobSpec, Store, init_queue, open_queue
from stoker.queue.model import AttemptDetails
from stoker.queue.store import Workers
from stoker.settings import Notifications
from tests.support.http_receiver import Answer, Receiver
from tests.support.mailbox import Mailbox, text_of
from tests.support.waiting import wait_for

LINK = "https://gpu-box:7865"
# Apprise gives up on a service after four seconds, and the ones here may be held up for longer.
PATIENT = "cto=600&rto=600"


@pytest.fixture
def store() -> Iterator[Store]:
    with init_queue() as found:
        yield found


def fail(store: Store, name: str, cause: str = "exited", sentence: str = "it ended with code 1", **fields: Any) -> str:
    """A job that has failed for good."""
    (job,) = store.jobs.submit([JobSpec(command="x", name=name, **fields)])
    attempt = store.attempts.claim([job], "w", [], 600.0)
    assert attempt is not None
    store.attempts.write_details(attempt.id, AttemptDetails(cause=cause, rule=cause if cause == "idle" else ""))
    assert store.attempts.finish(attempt.id, "failed", 1, sentence)
    return job


@contextmanager
def crying(
    *urls: str,
    events: tuple[str, ...] = ("failed",),
    opened: Callable[[], Store] = open_queue,
    say: Callable[[str], None] = lambda _sentence: None,
    pauses: tuple[float, ...] = (),
) -> Iterator[None]:
    notifier = Notifier(Notifications(urls=urls, events=events), LINK, opened, say, pauses)
    stop = threading.Event()
    thread = threading.Thread(target=notifier.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def webhook(receiver: Receiver, place: str = "", user: str = "") -> str:
    return f"json://{user}127.0.0.1:{receiver.port}/{place}?{PATIENT}"


def messages(receiver: Receiver, count: int = 1) -> list[Any]:
    wait_for(lambda: len(receiver.asked) >= count, named=f"message {count}")
    return [asked.json() for asked in receiver.asked]


def test_webhook_and_mailbox_get_name_reason_and_link(store: Store) -> None:
    with Receiver().listening() as hook, Mailbox().open() as mailbox:
        urls = (
            webhook(hook, "hook"),
            f"mailto://127.0.0.1:{mailbox.port}?from=stoker@example.org&to=alice@example.org&{PATIENT}",
        )
        with crying(*urls):
            job = fail(store, "train <7>", sentence="no space left on device")
            (result,) = messages(hook)
            (mail,) = wait_for(lambda: mailbox.mails, named="the mail")
    sentence = "Job “train ‹7›” failed with exit code 1: no space left on device."
    assert result["title"] == mail["Subject"] == "Stoker: job failed: train ‹7›"
    assert result["type"] == "failure"
    assert result["message"] == f"{sentence}\n{LINK}/jobs/{job}"
    assert mail["To"] == "alice@example.org"
    for piece in (sentence, f"{LINK}/jobs/{job}"):
        assert piece in text_of(mail)


def test_only_configured_kinds_of_events_are_sent(store: Store) -> None:
    wanted = ("stopped", "queue-empty")
    with Receiver().listening() as hook, crying(webhook(hook), events=wanted):
        fail(store, "hung", cause="idle", sentence="GPU 0 stayed below 1% for 30m")
        result = messages(hook, 2)
    assert sorted((one["title"], one["type"]) for one in result) == [
        ("Stoker: job was stopped by a rule: hung", "warning"),
        ("Stoker: the queue is empty", "info"),
    ]


def test_idle_stop_of_a_retried_job_is_sent_as_a_stop(store: Store) -> None:
    (job,) = store.jobs.submit([JobSpec(command="x", name="flaky", retries=1)])
    attempt = store.attempts.claim([job], "w", [], 600.0)
    assert attempt is not None
    looks = threading.Semaphore(0)

    class Watched(Workers):
        def all(self) -> Any:
            looks.release()
            return super().all()

    def opened() -> Store:
        store = open_queue()
        store.workers.__class__ = Watched
        return store

    wanted = ("failed", "stopped")
    with Receiver().listening() as hook, crying(webhook(hook), events=wanted, opened=opened):
        assert looks.acquire(timeout=60)  # it has seen the attempt run
        store.attempts.write_details(attempt.id, AttemptDetails(cause="idle", rule="idle"))
        store.attempts.finish(attempt.id, "failed", 1, "GPU 0 stayed below 1%")
        (result,) = messages(hook)
    assert result["message"].startswith("Job flaky was stopped: GPU 0 stayed below 1%. It will be tried again.")


def test_several_processes_send_an_event_once(store: Store) -> None:
    with Receiver().listening() as hook:
        url = webhook(hook)
        fail(store, "while nobody was there")
        with crying(url), crying(url):
            messages(hook)
        # The throttle would hide that the first one is sent again.
        with crying(url, opened=lambda: _unpaced(open_queue())):
            fail(store, "another")
            result = messages(hook, 2)
    assert [one["title"] for one in result] == [
        "Stoker: job failed: while nobody was there",
        "Stoker: job failed: another",
    ]


def _unpaced(store: Store) -> Store:
    """As if the last message were more than a minute old."""
    for (name,) in store._driver.fetch_text("SELECT name FROM stoker_notices WHERE name LIKE 'pace:%'", {}):
        store.notices.forget_note(name)
    return store


def test_unreachable_service_is_retried_then_dropped_without_showing_its_url(store: Store) -> None:
    said: list[str] = []
    with Receiver(Answer(500), Answer(500), Answer(200)).listening() as hook:
        with crying(webhook(hook, "t0psecret", "alice:hunter22@"), say=said.append, pauses=(0.05, 0.05)):
            fail(store, "train")
            messages(hook, 3)
        assert len(hook.asked) == 3
    with Receiver(Answer(500)).listening() as hook:
        url = webhook(hook, "t0psecret", "alice:hunter22@")
        with crying(url, say=said.append, pauses=(0.05,), opened=lambda: _unpaced(open_queue())):
            fail(store, "eval")
            wait_for(lambda: any("given up after 2 tries" in line for line in said), named=f"giving up: {said}")
    assert any("was not delivered" in line and "trying again" in line for line in said)
    for secret in ("alice", "hunter22", "t0psecret", "127.0.0.1"):
        assert secret not in "".join(said)


def test_unsent_event_is_sent_by_the_next_process(store: Store) -> None:
    said: list[str] = []
    with Receiver(Answer(503)).listening() as hook, crying(webhook(hook), say=said.append, pauses=(600.0,)):
        fail(store, "train")
        wait_for(lambda: said, named="the refusal")  # a message in flight counts as sent after a while
    with (
        Receiver().listening() as hook,
        crying(webhook(hook), opened=lambda: _unpaced(open_queue())),
    ):
        (result,) = messages(hook)
    assert result["title"] == "Stoker: job failed: train"


def test_hanging_service_delays_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.notifications.senders._STOP_TIMEOUT", 0.1)
    with (
        Receiver(Answer(after=600.0)).listening() as slow,
        Receiver().listening() as quick,
        crying(webhook(slow), webhook(quick)),
    ):
        fail(store, "train")
        messages(quick)


def test_notifier_waits_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.notifications.notifier._RETRY_AFTER", 0.05)
    said: list[str] = []
    with Receiver().listening() as hook, crying(webhook(hook), say=said.append):
        wait_for(lambda: said, named="the complaint")
        with init_queue() as store:
            fail(store, "train")
            messages(hook)
    assert len(said) == 1


def test_internal_error_is_logged_once_and_the_notifier_continues(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.notifications.notifier._RETRY_AFTER", 0.05)
    said: list[str] = []
    mistakes = iter(range(3))

    class Mistaken(Workers):
        def all(self) -> Any:
            if next(mistakes, None) is not None:
                raise ZeroDivisionError("postgres://alice:hunter22@db")
            return super().all()

    def opened() -> Store:
        found = open_queue()
        found.workers.__class__ = Mistaken
        return found

    fail(store, "train")
    with Receiver().listening() as hook, crying(webhook(hook), opened=opened, say=said.append):
        messages(hook)
    assert said == ["notifications are not sent: internal error (ZeroDivisionError) (trying again)"]


def test_only_reported_jobs_are_loaded(store: Store) -> None:
    for name in ("a", "b", "c"):
        (job,) = store.jobs.submit([JobSpec(command="x", name=name)])
        attempt = store.attempts.claim([job], "w", [], 600.0)
        assert attempt is not None
        store.attempts.finish(attempt.id, "succeeded", 0, "")
        fail(store, f"{name} failed")
    store._driver.fetch_text("UPDATE stoker_jobs SET ended = ended - 9", {})  # two ends may be one to the clock
    store.jobs.cancel(store.jobs.submit([JobSpec(command="x", name="last")]))
    sight = QueueWatch(with_successes=False).read(store)
    assert sorted(job.name for job in sight.ended) == ["a failed", "b failed", "c failed", "last"]
    assert len(sight.causes) == 3


def test_idle_stop_of_a_cancelled_job_is_not_called_a_retry(store: Store) -> None:
    (job,) = store.jobs.submit([JobSpec(command="x", name="hung", retries=1)])
    attempt = store.attempts.claim([job], "w", [], 600.0)
    assert attempt is not None
    watch = QueueWatch(with_successes=False)
    watch.read(store)
    store.attempts.write_details(attempt.id, AttemptDetails(cause="idle", rule="idle"))
    store.attempts.finish(attempt.id, "failed", 1, "")
    store.jobs.cancel([job])
    store.jobs.cancel(store.jobs.submit([JobSpec(command="x", name="last")]))
    assert watch.read(store).retried == {}


def test_failing_plugin_is_retried(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    breaks = iter([True])
    send = AppriseChannel.send

    def sending(self: AppriseChannel, *words: Any) -> None:
        if next(breaks, False):
            raise KeyError("t0psecret")
        send(self, *words)

    monkeypatch.setattr(AppriseChannel, "send", sending)
    fail(store, "train")
    with Receiver().listening() as hook, crying(webhook(hook), say=said.append, pauses=(0.1,)):
        messages(hook)
    assert said == ["the message by json:// was not sent (KeyError); trying again in 0.1s"]


def test_invalid_url_is_refused_without_being_shown() -> None:
    with pytest.raises(BadInputError, match=r"\[notify\]: URL 2 of 2 \(nonsense://…\) is not a URL") as refused:
        Notifier(Notifications(urls=("json://localhost/", "nonsense://t0psecret")), "", open_queue, print)
    assert "t0psecret" not in str(refused.value)


def succeed(store: Store, name: str, **fields: Any) -> str:
    (job,) = store.jobs.submit([JobSpec(command="x", name=name, **fields)])
    attempt = store.attempts.claim([job], "w", [], 600.0)
    assert attempt is not None
    assert store.attempts.finish(attempt.id, "succeeded", 0, "")
    return job


def titles(receiver: Receiver, count: int) -> list[tuple[str, str]]:
    return sorted((one["title"].removeprefix("Stoker: "), one["type"]) for one in messages(receiver, count))


def test_job_with_its_own_url_is_notified_without_urls_in_the_settings(store: Store) -> None:
    with Receiver().listening() as mine, Receiver().listening() as other, crying(), crying():
        succeed(store, "quiet")
        succeed(store, "loud", notify=(f"succeeded:{webhook(mine)}", f"failed:{webhook(other)}"))
        fail(store, "broken", notify=(f"end:{webhook(mine)}",))
        store.jobs.cancel(store.jobs.submit([JobSpec(command="x", name="gone", notify=(f"end:{webhook(mine)}",))]))
        found = titles(mine, 3)
    assert found == [
        ("job failed: broken", "failure"),
        ("job succeeded: loud", "success"),
        ("job was cancelled: gone", "warning"),
    ]
    assert other.asked == []


def test_when_without_a_url_means_the_urls_of_settings_and_page(store: Store) -> None:
    with Receiver().listening() as hook, Receiver().listening() as page:
        assert store.notices.add_url(webhook(page), "phone", ["failed"])
        with crying(webhook(hook)):
            succeed(store, "quiet")
            succeed(store, "loud", notify=("succeeded",))
            fail(store, "broken", notify=("end",))
            both = [("job failed: broken", "failure"), ("job succeeded: loud", "success")]
            assert titles(hook, 2) == titles(page, 2) == both


def test_url_of_the_page_gets_its_own_kinds_from_when_it_was_added(store: Store) -> None:
    fail(store, "earlier")
    with Receiver().listening() as page:
        name = store.notices.add_url(webhook(page), "phone", ["succeeded"])
        assert name is not None
        with crying():
            succeed(store, "first")
            assert titles(page, 1) == [("job succeeded: first", "success")]
            assert store.notices.set_events(name, ["failed"])
            fail(store, "second")
            assert titles(page, 2)[0] == ("job failed: second", "failure")


def test_end_of_a_group_is_sent_to_those_who_asked_and_once(store: Store) -> None:
    with Receiver().listening() as mine, crying(), crying():
        notify = (f"done:{webhook(mine)}",)
        first = succeed(store, "a", group="night", notify=notify)
        assert store.jobs.get(first).notify == store.groups.get("night").notify == notify
        assert titles(mine, 1) == [("group is done: night", "success")]
        fail(store, "b", group="night")
        assert "All 2 jobs of night have ended: 1 succeeded, 1 failed." in str(messages(mine, 2)[1])


def test_url_that_apprise_does_not_know_is_logged_without_it_and_stops_nothing(store: Store) -> None:
    said: list[str] = []
    with Receiver().listening() as mine, crying(say=said.append):
        fail(store, "a", notify=(f"end:{webhook(mine)}",))
        titles(mine, 1)
        (bad,) = store.jobs.submit([JobSpec(command="x", name="b")])
        store._driver.fetch("set notify", {"id": bad, "notify": '["end:nonsense://s3cret"]'})
        store.jobs.cancel([bad])
        wait_for(lambda: said, named="the log")
    (sentence,) = said
    assert sentence.startswith("a URL of a job or of the page (nonsense://…) is not a URL that apprise understands")
