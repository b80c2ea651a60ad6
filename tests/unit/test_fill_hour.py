"""A simulated hour with users on eight GPUs: sharing is short, and idle GPUs are filled soon."""

import pytest

from tests.support.fill_hour import BETWEEN_STARTS, Crowd, SharedGpu, an_hour

CROWDS = {
    "some people": Crowd(absent=400, present=240),
    "many short uses": Crowd(absent=200, present=60, short=0.8),
    "containers only": Crowd(absent=300, present=120, without_event=1.0),
    "nearly nobody": Crowd(absent=1800, present=600),
}


@pytest.fixture(params=CROWDS)
def crowd(request: pytest.FixtureRequest) -> Crowd:
    return CROWDS[request.param]


@pytest.fixture(params=[60.0, 15.0], ids="idle for {:g} s".format)
def idle_for(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=range(2), ids="seed {}".format)
def hour(request: pytest.FixtureRequest, crowd: Crowd, idle_for: float) -> list[SharedGpu]:
    return an_hour(crowd, idle_for, request.param)


def test_background_programs_step_aside_fill_idle_gpus_and_do_not_thrash(hour: list[SharedGpu]) -> None:
    too_long = [(beside, use) for shared in hour for beside, use in shared.longest_beside() if beside > use.promise]
    possible = sum(stretch.end - stretch.begin for shared in hour for stretch in shared.possible())
    filled = sum(shared.filled() for shared in hour)

    assert sum(beside > 0 for shared in hour for beside, _ in shared.longest_beside()) >= 1, "nobody was disturbed"
    assert too_long == []
    assert min(shared.least_between_starts() for shared in hour) >= BETWEEN_STARTS - 1e-6
    assert filled >= 0.9 * possible
