"""What a client of a shared helper is given: everything since its own last look, whatever other clients do."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.gpus.helper import HEADER, REQUEST, HelperReply
from stoker.gpus.history import LookHistory, joined
from stoker.gpus.model import (
    DeviceHealth,
    Gpu,
    Look,
    Pipes,
    Process,
    Reading,
    SourceChoice,
    Unknown,
    Utilization,
    known,
)
from stoker.gpus.sharing import PROTOCOL, VARIABLES
from stoker.gpus.source import sources

GPU = Gpu("GPU-0", 0, "H100", "nvidia", 0, 80 * 2**30, "0000:01:00.0")
MISSING = Unknown("not supported")


def look(
    at: float,
    span: float,
    peak: float = 0.0,
    *,
    mean: float | None = None,
    samples: int = 6,
    energy: float | None = None,
    power: float = 100.0,
    processes: tuple[Process, ...] = (),
    broken: str | None = None,
    pipes: Pipes | Unknown = MISSING,
) -> Look:
    if broken is not None:
        reading = Reading.unknown(GPU.uuid, broken, span=span)
    else:
        reading = Reading(
            GPU.uuid,
            span,
            Utilization(peak, peak if mean is None else mean, samples),
            0,
            80 * 2**30,
            power,
            700.0,
            MISSING if energy is None else energy,
            40.0,
            processes,
            pipes,
        )
    return Look("nvml", at, at, (GPU,), (reading,))


def process(pid: int, utilization: float, started: int = 1) -> Process:
    return Process(pid, started, "python", "ann", 0, utilization)


def used(seen: Look) -> Utilization:
    utilization = seen.readings[0].utilization
    assert known(utilization)
    return utilization


def test_look_of_another_client_takes_nothing_away() -> None:
    history = LookHistory()
    history.add(look(10, 1, 0.1))
    mine, other = history.mark(), history.mark()
    history.add(look(11, 1, 1.0))
    assert used(history.since(other)).peak == 1.0
    history.mark()
    history.release(other)
    history.add(look(15, 4, 0.2, samples=24))
    seen = history.since(mine)
    assert (seen.at, seen.readings[0].span) == (15, 5)
    assert (used(seen).peak, used(seen).samples) == (1.0, 30)
    assert used(seen).mean == pytest.approx((1.0 + 4 * 0.2) / 5)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 100)), min_size=1, max_size=60))
def test_each_client_sees_every_moment_once(turns: list[tuple[int, int, int]]) -> None:
    """At every turn one of four clients looks, after so many tenths of a second of so much use."""
    history = LookHistory()
    history.add(look(0, 1, energy=0.0))
    marks = {client: history.mark() for client in range(4)}
    unseen: dict[int, list[tuple[float, float]]] = {client: [] for client in range(4)}
    now, energy = 0.0, 0.0
    for client, tenths, percent in turns:
        span, peak = tenths / 10, percent / 100
        now, energy = now + span, energy + span * peak * 500
        history.add(look(now, span, peak, energy=energy, power=peak * 500))
        for past in unseen.values():
            past.append((span, peak))
        seen = history.since(marks[client])
        spans = sum(span for span, _ in unseen[client])
        assert seen.readings[0].span == pytest.approx(spans)
        assert used(seen).peak == max(peak for _, peak in unseen[client])
        mean = sum(span * peak for span, peak in unseen[client]) / spans
        assert used(seen).mean == pytest.approx(mean)
        assert seen.readings[0].power == pytest.approx(mean * 500)
        before, marks[client] = marks[client], history.mark()
        history.release(before)
        unseen[client].clear()
        assert len(history._marks) <= 4


def test_power_is_by_the_energy_counter_of_the_clients_own_last_look() -> None:
    history = LookHistory()
    history.add(look(0, 1, energy=1000.0))
    mark = history.mark()
    # What the driver says in a look that is too short for its counter does not matter.
    history.add(look(0.1, 0.1, energy=1050.0, power=9.0))
    history.add(look(10, 9.9, energy=4000.0, power=9.0))
    assert history.since(mark).readings[0].power == pytest.approx(300.0)


def test_driver_that_was_loaded_anew_has_no_negative_power() -> None:
    history = LookHistory()
    history.add(look(0, 1, energy=1000.0))
    mark = history.mark()
    history.add(look(5, 5, energy=0.0, power=80.0))
    history.add(look(10, 5, energy=400.0, power=80.0))
    assert history.since(mark).readings[0].power == pytest.approx(80.0)


def test_time_that_could_not_be_read_is_not_covered() -> None:
    seen = joined(look(5, 5, broken="lost"), look(6, 1, 0.3))
    assert (seen.readings[0].span, used(seen).peak) == (1, 0.3)
    lost = joined(look(5, 5, 0.3), look(6, 1, broken="lost"))
    assert lost.readings[0].utilization == Unknown("lost")


def test_machine_that_could_not_be_read_is_not_covered() -> None:
    failed = Look("nvml", 5, 5, (), (), problem=Unknown("no driver"))
    assert joined(failed, look(6, 1, 0.3)) == look(6, 1, 0.3)
    assert joined(look(4, 1, 0.3), failed) == failed


@pytest.mark.parametrize(
    ("first", "second", "samples"),
    [
        ((5.0, 30), (0.05, 1), 31),  # so soon after another look the buffer is empty
        ((0.05, 1), (5.0, 30), 31),
        ((5.0, 1), (5.0, 30), 1),  # a momentary sample for five seconds
        ((0.5, 1), (0.5, 1), 1),
        ((5.0, 0), (5.0, 0), 0),  # counters
    ],
)
def test_momentary_sample_covers_only_the_time_around_it(
    first: tuple[float, int], second: tuple[float, int], samples: int
) -> None:
    seen = joined(look(5, first[0], samples=first[1]), look(10, second[0], samples=second[1]))
    assert used(seen).samples == samples


def test_process_has_its_mean_and_a_reused_pid_its_own() -> None:
    before = (process(7, 1.0), process(8, 0.5), process(9, 0.5))
    after = (process(7, 0.5), process(8, 0.1, started=2))
    seen = joined(look(3, 3, processes=before), look(4, 1, processes=after)).readings[0].processes
    assert known(seen)
    assert {(one.pid, one.utilization) for one in seen} == {(7, 0.875), (8, 0.1)}


def test_pipes_are_means() -> None:
    def busy(tensor: float) -> Pipes:
        return Pipes(tensor, tensor, tensor, MISSING)

    seen = joined(look(3, 3, pipes=busy(1.0)), look(4, 1, pipes=busy(0.0))).readings[0].pipes
    assert seen == Pipes(0.75, 0.75, 0.75, MISSING, Unknown("not recorded"), Unknown("not recorded"))


def test_protocol_has_a_new_number_when_messages_change() -> None:
    """Processes of two versions never share a helper; two states of one version must not either."""
    kinds = (HelperReply, Look, Reading, Process, Gpu, SourceChoice, Unknown)
    fields = [kind.__struct_fields__ for kind in kinds] + [Utilization._fields, Pipes._fields, DeviceHealth._fields]
    digest = hashlib.sha256(repr((fields, REQUEST.format, HEADER.format)).encode()).hexdigest()[:12]
    assert (PROTOCOL, digest) == (3, "c3fd103486af"), "raise PROTOCOL in gpus/sharing.py, and enter both here"


def test_every_source_states_which_variables_decide_what_it_reads() -> None:
    assert set(VARIABLES) == {entry.name for entry in sources()}
