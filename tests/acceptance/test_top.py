"""`stoker top` as typed, on a real terminal."""

import os
import signal

import pytest

from stoker.queue import Store
from stoker.queue.model import View, WorkerGpu
from tests.support.command import stoker, stoker_command
from tests.support.queue_jobs import end, start, states, submit
from tests.support.terminal import Terminal, terminal

TOP = [stoker_command(), "top"]
LEFT = ("\x1b[?1049l\x1b[?25h", "\x1b[?25h\x1b[?1049l")


def be_there(queue: Store) -> None:
    gpu = WorkerGpu(uuid="GPU-0", index=0, name="A100", state="free", utilization=0.0)
    queue.workers.heartbeat("w", "gpu-box", View(gpus=(gpu,)))


def left_clean(top: Terminal) -> bool:
    return top.drawn.rstrip().endswith(LEFT)


def test_jobs_are_selected_and_acted_on_by_keys(queue: Store) -> None:
    be_there(queue)
    first, second = submit(queue, "alpha", "beta")
    with terminal(TOP) as top:
        top.until("> alpha")
        modes = top.modes_now()
        top.do("j", "> beta")
        top.do("h", f"beta ({second}): held")
        top.do("h", f"beta ({second}): released")
        top.do("u", f"beta ({second}): moved up")
        top.do("c", f"beta ({second}): cancelled")
        assert states(queue, first, second) == ["queued", "cancelled"]
        top.do("r", f"beta ({second}): queued again")
        top.do("r", f"beta ({second}) was not queued again: it waits in the queue already")
        top.do("s", "nothing was done: only a running job can be snoozed")
        top.do("p", "the queue is paused")
        assert queue.paused()
        top.do("p", "the queue is resumed")
        top.do("?", "follow its log; q returns")
        top.do("\x1b", "running (0)")
        # What others do shows without a key.
        submit(queue, "gamma")
        top.until("gamma")
        top.press("q")
        assert top.code() == 0
    assert modes != top.modes
    assert left_clean(top)


def test_stopping_a_running_job_needs_confirmation(queue: Store) -> None:
    be_there(queue)
    (job,) = submit(queue, "train")
    attempt = start(queue, job)
    with terminal(TOP) as top:
        top.until("> train")
        top.do("c", "is running: stop it? y/n")
        top.do("n", "nothing was done")
        assert queue.jobs.get(job).cancel_requested is None
        top.do("s", "is snoozed for 30m")
        assert attempt in queue.attempts.snoozes()
        top.do("c", "stop it? y/n")
        top.do("y", f"train ({job}): asked to stop")
        assert queue.jobs.get(job).cancel_requested is not None
        top.press("q")
        assert top.code() == 0


def test_sweep_is_one_row_that_unfolds_and_is_cancelled_with_one_question(queue: Store) -> None:
    be_there(queue)
    jobs = submit(queue, *(f"lr={number}" for number in range(4)), group="bert")
    end(queue, jobs[0])
    start(queue, jobs[1])
    with terminal(TOP) as top:
        drawn = top.until("> ▸ bert")
        assert "1 of 4 done, 1 failed, 1 running" in top.text
        assert "lr=3" not in top.drawn
        top.press("\x1b[C")
        top.until("lr=3", drawn)
        top.do("\x1b[D", "> ▸ bert")
        top.do("c", "cancel 3 jobs of bert, 1 of them running? y/n")
        top.do("y", "bert: 2 jobs cancelled, 1 job asked to stop")
        top.press("q")
        assert top.code() == 0
    assert states(queue, *jobs) == ["failed", "running", "cancelled", "cancelled"]
    assert queue.jobs.get(jobs[1]).cancel_requested is not None
    assert "▸ bert" in stoker("top", "--once").out


def test_details_and_log_of_a_job_open_and_close(queue: Store) -> None:
    be_there(queue)
    (job,) = submit(queue, "train")
    attempt = start(queue, job)
    queue.logs.write(attempt, "epoch 1\n\x1b]0;evil title\x07epoch 2\n")
    with terminal(TOP) as top:
        top.until("> train")
        top.do("\r", "epoch 2")
        assert "attempt 1 on gpu-box" in top.text
        assert "echo train" in top.text
        assert "evil title\x07" not in top.drawn
        top.do("q", "> train")
        top.do("l", "epoch 2")
        assert f"the log of job {job}: q returns" in top.drawn
        queue.attempts.finish(attempt, "succeeded", 0)
        top.until("it has ended: q returns")
        top.do("q", "ended (1)")
        top.press("q")
        assert top.code() == 0
    assert left_clean(top)


def test_resized_terminal_is_used(queue: Store) -> None:
    with terminal(TOP) as top:
        drawn = top.until("q quit")
        assert "p pause" not in top.drawn
        top.resize(120, 40)
        top.until("p pause", drawn)
        top.press("q")
        assert top.code() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_terminal_is_restored_after_sigterm(queue: Store, number: signal.Signals, code: int) -> None:
    with terminal(TOP) as top:
        top.until("q quit")
        os.kill(top.pid, number)
        assert top.code() == code
    assert left_clean(top)


def test_terminal_is_restored_after_an_internal_error(queue: Store) -> None:
    program = (
        "import stoker.cli.top.session as session, sys; from stoker.cli.app import run\n"
        "def fail(*_): raise ValueError('boom')\n"
        "session.turn_queue = fail\n"
        "sys.exit(run(['top']))"
    )
    with terminal([os.environ.get("PYTHON", "python"), "-c", program]) as top:
        top.until("q quit")
        top.press("p")
        assert top.code() == 125
    assert "internal error: ValueError: boom" in top.drawn
    assert top.drawn.index("?1049l") < top.drawn.index("internal error")


def test_top_can_be_suspended_and_resumed(queue: Store) -> None:
    echoes = "stty -a | grep -o '.echo '"
    script = f"set -m; {stoker_command()} top; {echoes}; echo as''leep; fg; echo code $?; {echoes}"
    with terminal(["bash", "-c", script]) as top:
        drawn = top.until("q quit")
        top.press("\x1a")
        asleep = top.until("asleep", drawn)
        assert any(mark in top.drawn[drawn:asleep] for mark in LEFT)
        assert " echo" in top.text.split("asleep")[0][-20:]
        top.until("q quit", top.drawn.index("asleep"))
        assert top.drawn.index("?1049h", top.drawn.index("asleep"))
        top.press("q")
        assert top.code() == 0
    assert "code 0" in top.text
    assert top.text.rstrip().endswith(" echo")


def test_missing_terminal_is_reported_with_an_alternative(queue: Store) -> None:
    done = stoker("top")
    assert (done.code, done.out) == (2, "")
    assert done.err == ("stoker: top needs a terminal: --once prints it once as text, --json as JSON\n")


def test_top_prints_once_as_text_or_json(queue: Store) -> None:
    be_there(queue)
    job, failed = submit(queue, "alpha", "x" * 150)
    end(queue, failed)
    done = stoker("top", "--once")
    assert done.code == 0
    for text in ("gpu-box", "waiting (1)", f" {job} ", "ended (1)", "\x1b"):
        assert (text in done.out) == (text != "\x1b")
    result = stoker("top", "--json").json()
    assert [one["job"]["name"] for one in result["waiting"]] == ["alpha"]
    assert result["machines"][0]["gpus"][0]["state"] == "free"
    assert set(result) >= {"health", "hours", "counts", "running", "ended", "paused", "place"}
