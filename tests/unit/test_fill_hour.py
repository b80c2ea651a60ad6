"""A simulated hour with users on eight GPUs: sharing is short, and idle GPUs are filled soon."""

import pytest

from tests.support.fill_hour import BETWEEN_STARTS, SimulatedGpu, UserPattern, an_hour

PATTERNS = {
    "some users": UserPattern(absent=400, present=240),
    "many short uses": UserPattern(absent=200, present=60, short=0.8),
    "containers only": UserPattern(absent=300, present=120, without_events=1.0),
    "few users": UserPattern(absent=1800, present=600),
}


@pytest.fixture(params=PATTERNS)
def pattern(request: pytest.FixtureRequest) -> UserPattern:
    return PATTERNS[request.param]


@pytest.fixture(params=[60.0, 15.0], ids="idle for {:g} s".format)
def idle_for(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=range(2), ids="seed {}".format)
def hour(request: pytest.FixtureRequest, pattern: UserPattern, idle_for: float) -> list[SimulatedGpu]:
    return an_hour(pattern, idle_for, request.param)


def test_background_programs_step_aside_fill_idle_gpus_and_do_not_thrash(hour: list[SimulatedGpu]) -> None:
    too_long = [(beside, use) for gpu in hour for beside, use in gpu.longest_beside() if beside > use.limit]
    possible = sum(span.end - span.begin for gpu in hour for span in gpu.possible())
    filled = sum(gpu.filled() for gpu in hour)

    assert sum(beside > 0 for gpu in hour for beside, _ in gpu.longest_beside()) >= 1, "no user was disturbed"
    assert too_long == []
    assert min(gpu.least_between_starts() for gpu in hour) >= BETWEEN_STARTS - 1e-6
    assert filled >= 0.9 * possible
