"""A GPU vendor from outside: one module that registers itself is all that Stoker needs to use its GPUs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import stoker
from tests.support.fill_site import FillSite
from tests.support.mock_nvml import MockMachine

MODULE = '''
"""Accelerators of the vendor Acme, as a module outside Stoker defines them. The file `busy` says how busy they are."""

import os
import time
from pathlib import Path

from stoker.gpus.model import Gpu, Look, Reading, Unknown, Utilization, plausible_fraction, known
from stoker.gpus.source import SourceEntry, register
from stoker.gpus.visible import Vendor, register_vendor

UNKNOWN = Unknown("Acme's driver does not report it")


class AcmeSource:
    name = "acme"

    def __init__(self, directory):
        self._directory = directory
        self._at = time.monotonic()

    def look(self):
        at = time.monotonic()
        span, self._at = at - self._at, at
        gpus = tuple(Gpu(f"ACME-{n}", n, "Acme One", "acme", n, 2**34, UNKNOWN) for n in range(2))
        busy = plausible_fraction(float((self._directory / "busy").read_text()))
        used = Utilization(busy, busy, 0) if known(busy) else busy
        readings = tuple(
            Reading(gpu.uuid, span, used, 0, 2**34, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, (), UNKNOWN)
            for gpu in gpus
        )
        return Look(self.name, at, time.time(), gpus, readings)

    def close(self):
        pass


def open_source(root, argument):
    return AcmeSource(Path(os.environ["ACME"]))


def seen(gpus, environment):
    chosen = environment.get("ACME_VISIBLE")
    return gpus if chosen is None else [gpu for gpu in gpus if str(gpu.index) in chosen.split(",")]


register(SourceEntry("acme", "acme_gpus:open_source", "Acme accelerators", auto=True), before="nvml")
register_vendor(
    Vendor("acme", ("ACME_VISIBLE",), seen, nodes=lambda gpu, present, root: (root / f"dev/acme{gpu.index}",))
)
'''


class AcmeSite(FillSite):
    """A machine to fill that has Acme's device nodes."""

    @property
    def nodes(self) -> list[Path]:
        return [self.root / f"dev/acme{number}" for number in range(2)]


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every interpreter that is started here imports the vendor's module, as an installed plug-in would be."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin/acme_gpus.py").write_text(MODULE)
    (tmp_path / "plugin/sitecustomize.py").write_text("import acme_gpus")
    (tmp_path / "busy").write_text("40")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/plugin:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("ACME", str(tmp_path))
    return tmp_path


def test_gpus_are_listed() -> None:
    first, second = stoker("gpus", "--json").json()
    assert (first["name"], first["vendor"], first["state"], first["utilization"]) == ("Acme One", "acme", "busy", 0.4)
    assert second["uuid"] == "ACME-1"


def test_choice_is_explained() -> None:
    assert "stoker: acme: used: it reads the GPUs of this machine" in stoker("gpus", "--explain").err
    assert "acme" in stoker("gpus", "--help").out
    assert "acme" in stoker("gpus", "--source", "nothing").err


def test_run_stops_a_command_whose_gpus_are_idle(acme: Path) -> None:
    (acme / "busy").write_text("0")
    done = stoker(
        "run", "--gpus", "1", "--for", "1s", "--after", "0s", "--every", "200ms", "--grace", "1s", "--", "sleep", "600"
    )
    assert done.code == 124, done.err


def test_run_does_not_stop_a_command_whose_gpus_are_busy() -> None:
    done = stoker("run", "--gpus", "1", "--for", "1s", "--after", "0s", "--every", "200ms", "--", "sleep", "2")
    assert done.code == 0, done.err


@pytest.fixture
def filling(acme: Path, nvidia: MockMachine) -> Iterator[FillSite]:
    site = AcmeSite(acme / "site", nvidia)
    yield site
    site.close()


def test_background_program_stops_when_another_user_opens_the_device_node(acme: Path, filling: FillSite) -> None:
    (acme / "busy").write_text("0")
    filling.program("miner-run", 'echo "start $$ $ACME_VISIBLE" >> "$JOURNAL"; exec sleep 1000')
    filling.fill("--config", filling.config("cmd = miner-run\ngpus = 1"), environment={"STOKER_GPUS": "auto"})
    (miner,) = filling.wait_for_start()
    assert filling.started() == {miner: "1"}
    filling.open_node(1)
    filling.wait_for_end(miner)
