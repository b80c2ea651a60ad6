"""Ending the surrounding Determined task, against a master on loopback and a stand-in for `det`."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stoker.actions.action import ActionError, Facts
from stoker.actions.determined import Determined
from tests.support.http_receiver import Answer, Receiver
from tests.support.stand_ins import StandIns

FACTS = Facts(kind="idle", cause="its GPUs stayed idle", reason="", rule="", gpus=(), seconds=0, host="")
TOKEN_REFUSED = Answer(401, '{"error": {"message": "invalid credentials"}}')


class Task:
    """The inside of a task of Determined."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self.programs = StandIns(directory / "bin")
        self.environment = {
            "PATH": self.programs.path,
            "DET_TASK_TYPE": "NOTEBOOK",
            "DET_TASK_ID": "task-1",
            "DET_SESSION_TOKEN": "session-secret",
            "DET_USER_TOKEN": "user-secret",
        }

    def master(self, *answers: Answer) -> Receiver:
        receiver = self._stack.enter_context(Receiver(*answers).listening())
        self.environment["DET_MASTER"] = f"http://127.0.0.1:{receiver.port}"
        return receiver

    def action(self, **changes: str) -> Determined:
        self.environment |= changes
        return Determined(self.environment, pauses=(0.01, 0.01))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    there = Task(tmp_path)
    yield there
    there.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("NOTEBOOK", "/api/v1/notebooks/task-1/kill"),
        ("SHELL", "/api/v1/shells/task-1/kill"),
        ("COMMAND", "/api/v1/commands/task-1/kill"),
        ("TENSORBOARD", "/api/v1/tensorboards/task-1/kill"),
        ("GENERIC", "/api/v1/tasks/task-1/kill"),
        ("TRIAL", "/api/v1/trials/42/kill"),
    ],
)
def test_each_task_type_is_killed_through_its_endpoint(task: Task, kind: str, path: str) -> None:
    master = task.master()
    action = task.action(DET_TASK_TYPE=kind, DET_TRIAL_ID="42")
    assert action.prepare() == ()
    assert [asked.path for asked in master.asked] == ["/api/v1/me"]
    action.act(FACTS)
    assert [(asked.method, asked.path) for asked in master.asked[1:]] == [("POST", path)]


def test_user_token_is_sent_in_the_user_header(task: Task) -> None:
    master = task.master()
    action = task.action()
    action.prepare()
    action.act(FACTS)
    assert master.asked[-1].headers["Authorization"] == "Bearer user-secret"


def test_task_token_is_sent_in_the_task_header(task: Task) -> None:
    master = task.master()
    action = task.action(DET_USER_TOKEN="")
    action.prepare()
    action.act(FACTS)
    headers = {name.lower(): value for name, value in master.asked[-1].headers.items()}
    assert headers["grpc-metadata-x-allocation-token"] == "Bearer session-secret"
    assert "authorization" not in headers


def test_task_token_is_tried_after_the_user_token_is_refused(task: Task) -> None:
    master = task.master(Answer(), TOKEN_REFUSED, Answer())
    action = task.action()
    action.prepare()
    action.act(FACTS)
    assert [asked.method for asked in master.asked] == ["GET", "POST", "POST"]
    assert "Authorization" not in master.asked[-1].headers


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"DET_TASK_ID": ""}, "this is not the inside of a Determined task"),
        ({"DET_TASK_TYPE": ""}, "this is not the inside of a Determined task"),
        ({"DET_TASK_TYPE": "TRIAL"}, "DET_TRIAL_ID is not set"),
        ({"DET_TASK_TYPE": "CHECKPOINT_GC"}, "Determined has no way to end a task of type CHECKPOINT_GC"),
        ({"DET_MASTER": ""}, "there is no det command on PATH"),
        ({"DET_USER_TOKEN": "", "DET_SESSION_TOKEN": ""}, "there is no det command on PATH"),
        ({"DET_MASTER": "http://[oops"}, "is not the address of a Determined master"),
        ({"DET_MASTER": "ftp://master"}, "is not the address of a Determined master"),
    ],
)
def test_invalid_setup_is_refused_at_startup(task: Task, missing: dict[str, str], sentence: str) -> None:
    task.master()
    with pytest.raises(ActionError) as refused:
        task.action(**missing).prepare()
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


def test_rejected_token_is_refused_at_startup(task: Task) -> None:
    task.master(TOKEN_REFUSED)
    with pytest.raises(ActionError, match=r"does not accept this task's token: .* 401 \(invalid credentials\)"):
        task.action().prepare()


def test_unreachable_master_at_startup_is_retried_later(task: Task) -> None:
    with socket.socket() as silent:  # bound, and never listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        task.environment["DET_MASTER"] = f"127.0.0.1:{silent.getsockname()[1]}"
        [note] = task.action().prepare()
    assert "does not answer" in note
    assert "it is asked again" in note


def test_older_master_without_the_check_is_accepted(task: Task) -> None:
    task.master(Answer(404, "not json"))
    [note] = task.action().prepare()
    assert "the Determined master answered 404 Not Found" in note


def test_request_is_retried_after_a_server_error(task: Task) -> None:
    master = task.master(Answer(), Answer(502), Answer(503), Answer())
    action = task.action()
    action.prepare()
    action.act(FACTS)
    assert [asked.method for asked in master.asked] == ["GET", "POST", "POST", "POST"]


def test_permanent_error_is_not_retried(task: Task) -> None:
    master = task.master(Answer(), Answer(404, '{"message": "notebook task-1 not found"}'))
    action = task.action()
    action.prepare()
    with pytest.raises(ActionError, match=r"notebook task-1 was not ended: .*404 \(notebook task-1 not found\)"):
        action.act(FACTS)
    assert len(master.asked) == 2


def test_redirect_does_not_count_as_success(task: Task) -> None:
    master = task.master(Answer(), Answer(302, "", (("Location", "/login"),)), Answer())
    action = task.action()
    action.prepare()
    with pytest.raises(ActionError, match="was not ended: the Determined master answered 302"):
        action.act(FACTS)
    assert [asked.path for asked in master.asked] == ["/api/v1/me", "/api/v1/notebooks/task-1/kill"]


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("NOTEBOOK", "det notebook kill task-1"),
        ("SHELL", "det shell kill task-1"),
        ("COMMAND", "det command kill task-1"),
        ("TENSORBOARD", "det tensorboard kill task-1"),
        ("GENERIC", "det task kill task-1"),
        ("TRIAL", "det trial kill 42"),
    ],
)
def test_task_without_token_is_killed_by_the_det_command(task: Task, kind: str, call: str) -> None:
    task.programs.add("det")
    action = task.action(DET_TASK_TYPE=kind, DET_TRIAL_ID="42", DET_USER_TOKEN="", DET_SESSION_TOKEN="")
    assert action.prepare() == ()
    action.act(FACTS)
    assert task.programs.calls == [call]


def test_det_command_is_tried_after_the_master_refuses(task: Task) -> None:
    task.programs.add("det")
    task.master(TOKEN_REFUSED)
    action = task.action()
    assert action.prepare() == ()
    action.act(FACTS)
    assert task.programs.calls == ["det notebook kill task-1"]


def test_error_has_both_reasons_when_request_and_command_fail(task: Task) -> None:
    task.programs.add("det", "echo 'det: not logged in' >&2; exit 1")
    task.master(TOKEN_REFUSED)
    action = task.action()
    action.prepare()
    with pytest.raises(ActionError) as failed:
        action.act(FACTS)
    assert "answered 401 (invalid credentials)" in str(failed.value)
    assert "'det notebook kill task-1' failed: det: not logged in" in str(failed.value)
    assert "secret" not in str(failed.value)


def test_task_id_cannot_change_the_request_path(task: Task) -> None:
    master = task.master()
    action = task.action(DET_TASK_ID="../trials/1")
    action.prepare()
    action.act(FACTS)
    assert master.asked[-1].path == "/api/v1/notebooks/..%2Ftrials%2F1/kill"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for the name `determined-master`, which nobody else vouches for."""
    file = tmp_path_factory.mktemp("tls") / "master.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
         "2", "-subj", "/CN=determined-master", "-addext", "subjectAltName=DNS:determined-master",
         "-keyout", str(file), "-out", f"{file}.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


def secure_master(stack: ExitStack, certificate: Path) -> Receiver:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return stack.enter_context(Receiver(tls=context).listening())


def test_certificate_is_verified_as_determined_configures_it(task: Task, certificate: Path) -> None:
    with ExitStack() as stack:
        master = secure_master(stack, certificate)
        task.environment["DET_MASTER"] = f"https://127.0.0.1:{master.port}"
        [note] = task.action().prepare()
        assert "does not answer" in note
        assert "certificate" in note.lower()
        trusted = {"DET_MASTER_CERT_FILE": str(certificate), "DET_MASTER_CERT_NAME": "determined-master"}
        assert len(task.action(**{**trusted, "DET_MASTER_CERT_NAME": "somebody-else"}).prepare()) == 1
        assert master.asked == []
        assert task.action(**trusted).prepare() == ()
        assert task.action(DET_MASTER_CERT_FILE="noverify", DET_MASTER_CERT_NAME="").prepare() == ()
        assert len(master.asked) == 2


def test_invalid_certificate_is_refused(task: Task, tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("nonsense")
    task.master()
    with pytest.raises(ActionError, match="the certificate in DET_MASTER_CERT_FILE"):
        task.action(DET_MASTER_CERT_FILE=str(tmp_path / "cert")).prepare()
