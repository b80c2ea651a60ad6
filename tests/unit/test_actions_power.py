"""Shutdown and reboot: the command, the required permission, and startup checks."""

from pathlib import Path

import pytest

from stoker.actions.action import ActionError, Facts
from stoker.actions.power import Power, What, container_sign
from tests.support.stand_ins import StandIns

FACTS = Facts(
    kind="idle",
    cause="its GPUs stayed idle",
    reason="GPU 0 stayed below 1% for 30m",
    rule="",
    gpus=(),
    seconds=1800,
    host="here",
)
ALICE = 1000


class Machine:
    """A machine below a directory; PATH has only the programs that a test adds."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        (self.root / "proc/1").mkdir(parents=True)
        self.first_process("systemd")
        self.programs = StandIns(directory / "bin")

    def first_process(self, name: str) -> None:
        (self.root / "proc/1/comm").write_text(f"{name}\n")

    def boot_systemd(self) -> None:
        (self.root / "run/systemd/system").mkdir(parents=True)

    def power(self, what: What, user: int = 0) -> Power:
        return Power(what, {"PATH": self.programs.path, "STOKER_ROOT": str(self.root)}, user=user)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("what", "word"), [("shutdown", "poweroff"), ("reboot", "reboot")])
def test_root_uses_systemd_where_it_runs(machine: Machine, what: What, word: str) -> None:
    machine.boot_systemd()
    for name in ("systemctl", "shutdown"):
        machine.programs.add(name)
    power = machine.power(what)
    assert power.prepare() == ()
    assert machine.programs.calls == []
    power.act(FACTS)
    assert machine.programs.calls == [f"systemctl {word}"]


@pytest.mark.parametrize(("what", "words"), [("shutdown", "-h now"), ("reboot", "-r now")])
def test_shutdown_command_is_used_without_systemd(machine: Machine, what: What, words: str) -> None:
    machine.first_process("init")
    for name in ("systemctl", "shutdown"):
        machine.programs.add(name)
    power = machine.power(what)
    power.prepare()
    assert f"`shutdown {words}`" in power.describe()
    power.act(FACTS)
    assert machine.programs.calls == [f"shutdown {words}"]


def test_poweroff_is_used_without_a_shutdown_command(machine: Machine) -> None:
    machine.programs.add("poweroff")
    power = machine.power("shutdown")
    power.prepare()
    power.act(FACTS)
    assert machine.programs.calls == ["poweroff "]


def test_programs_in_sbin_are_found_outside_path(machine: Machine) -> None:
    outside = StandIns(machine.root / "usr/sbin")
    outside.add("shutdown")
    power = machine.power("shutdown")
    power.prepare()
    power.act(FACTS)
    assert outside.calls == ["shutdown -h now"]


def test_machine_without_a_shutdown_program_is_refused(machine: Machine) -> None:
    with pytest.raises(ActionError, match="nothing here can shut this machine down: neither systemctl nor shutdown"):
        machine.power("shutdown").prepare()


@pytest.mark.parametrize(("what", "question"), [("shutdown", "CanPowerOff"), ("reboot", "CanReboot")])
def test_user_permitted_by_logind_needs_no_sudo(machine: Machine, what: What, question: str) -> None:
    machine.boot_systemd()
    machine.programs.add("systemctl")
    machine.programs.add("sudo", "exit 1")
    machine.programs.add("busctl", "echo 's \"yes\"'")
    power = machine.power(what, ALICE)
    power.prepare()
    assert machine.programs.calls == [
        f"busctl call org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager {question}"
    ]
    power.act(FACTS)
    assert machine.programs.calls[1:] == [f"systemctl {'poweroff' if what == 'shutdown' else 'reboot'}"]


@pytest.mark.parametrize("answer", ["echo 's \"challenge\"'", "echo 's \"no\"'", "echo 's \"na\"'", "exit 1"])
def test_user_without_permission_uses_sudo_without_a_password(machine: Machine, answer: str) -> None:
    machine.boot_systemd()
    systemctl = machine.programs.add("systemctl")
    machine.programs.add("busctl", answer)
    machine.programs.add("sudo")
    power = machine.power("shutdown", ALICE)
    power.prepare()
    # -k: a cached password may have expired when the action runs.
    assert machine.programs.calls[-1] == f"sudo -n -k -l {systemctl} poweroff"
    power.act(FACTS)
    assert machine.programs.calls[-1] == f"sudo -n {systemctl} poweroff"


def test_missing_permission_is_refused_at_the_start(machine: Machine) -> None:
    shutdown = machine.programs.add("shutdown")
    machine.programs.add("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    with pytest.raises(ActionError) as refused:
        machine.power("shutdown", ALICE).prepare()
    sentence = str(refused.value)
    assert "may not shut this machine down without a password (sudo says: sudo: a password is required)" in sentence
    assert f"NOPASSWD: {shutdown} -h now" in sentence
    assert refused.value.exit_code == 125
    assert not any(call.startswith("shutdown") for call in machine.programs.calls)


def test_missing_sudo_is_refused_at_the_start(machine: Machine) -> None:
    machine.programs.add("shutdown")
    with pytest.raises(ActionError, match=r"may not reboot this machine without a password \(sudo is not installed\)"):
        machine.power("reboot", ALICE).prepare()


def test_failed_command_is_a_failed_action_with_its_error_output(machine: Machine) -> None:
    machine.programs.add("shutdown", "echo 'shutdown: the bus is down' >&2; exit 1")
    power = machine.power("shutdown")
    power.prepare()
    with pytest.raises(ActionError, match="shutdown -h now' failed: shutdown: the bus is down"):
        power.act(FACTS)
    assert machine.programs.calls == ["shutdown -h now"]


@pytest.mark.parametrize("sign", [".dockerenv", "run/.containerenv"])
def test_container_warning_says_that_only_the_container_ends(machine: Machine, sign: str) -> None:
    (machine.root / sign).parent.mkdir(exist_ok=True)
    (machine.root / sign).touch()
    machine.programs.add("shutdown")
    [warning] = machine.power("shutdown").prepare()
    assert warning.startswith(f"this looks like a container (there is a /{sign}): shutting down from inside ends")


@pytest.mark.parametrize(
    ("first", "sign"),
    [("systemd", None), ("init", None), ("bash", "process 1 is 'bash', which is not an init")],
)
def test_container_is_detected_by_its_first_process(machine: Machine, first: str, sign: str | None) -> None:
    machine.first_process(first)
    assert container_sign(machine.root) == sign


def test_hidden_first_process_is_not_a_container(machine: Machine) -> None:
    (machine.root / "proc/1/comm").unlink()
    assert container_sign(machine.root) is None
