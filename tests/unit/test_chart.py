"""The utilization chart of a window, in text."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stoker.gpus.model import Look, Maybe, Unknown
from stoker.runs.postmortem.text import WIDTH, Sample, chart, series_of
from tests.support.looks import a_look

SICK = Unknown("the driver did not answer")
HALF_SEEN: tuple[Maybe[float], ...] = (0.0, SICK)
HALF_BUSY: tuple[Maybe[float], ...] = (1.0, SICK)


def looks_every(seconds: float, *utilizations: Maybe[float]) -> list[Look]:
    """Looks at one GPU at this interval, oldest first."""
    return [a_look(used, at=1000 + seconds * (n + 1), span=seconds) for n, used in enumerate(utilizations)]


def bars(drawn: str, line: int = 0) -> str:
    """The text between the label and the peak."""
    return drawn.splitlines()[line][len("GPU 0 ") : WIDTH - 5]


def drawn_of(looks: list[Look], window: float, below: float | None = 0.01) -> str:
    return chart(series_of(looks), window, below=below)


class TestWhatIsDrawn:
    def test_job_that_goes_idle_falls_from_full_to_zero(self) -> None:
        drawn = drawn_of(looks_every(10, *[1.0] * 60, *[0.0] * 120), 1800)
        assert bars(drawn) == "█" * 10 + "▁" * 19
        assert drawn.splitlines()[0].endswith(" 100%")

    def test_many_looks_are_reduced_to_the_peak_of_each_column(self) -> None:
        utilizations = [0.0] * 5800
        utilizations[2900] = 0.6
        drawn = drawn_of(looks_every(1, *utilizations), 5800)
        assert bars(drawn) == "▁" * 14 + "▆" + "▁" * 14

    def test_smallest_activity_is_not_rounded_to_zero(self) -> None:
        drawn = drawn_of(looks_every(1, *[0.0] * 28, 0.001), 29)
        assert bars(drawn) == "▁" * 28 + "▂"
        assert drawn.splitlines()[0].endswith(" <1%")

    def test_sparse_looks_fill_all_columns_of_their_span(self) -> None:
        drawn = drawn_of(looks_every(10, 0.0, 1.0, 0.0), 30)
        assert bars(drawn).count("█") == 10
        assert " " not in bars(drawn)

    def test_gap_between_looks_is_blank(self) -> None:
        looks = [a_look(0.0, at=at, span=1.0) for at in (*range(1, 11), *range(20, 30))]
        drawn = drawn_of(looks, 29)
        assert bars(drawn) == "▁" * 10 + " " * 9 + "▁" * 10

    def test_readings_before_the_window_are_not_drawn(self) -> None:
        drawn = drawn_of(looks_every(1, *[1.0] * 100, *[0.0] * 29), 29)
        assert bars(drawn) == "▁" * 29
        assert "100%" not in drawn

    def test_window_longer_than_the_run_starts_blank(self) -> None:
        assert bars(drawn_of(looks_every(1, *[0.0] * 10), 29)) == " " * 19 + "▁" * 10


class TestUnknown:
    def test_unknown_is_a_question_mark_with_a_legend(self) -> None:
        drawn = drawn_of(looks_every(1, *[0.0] * 10, *[SICK] * 9, *[0.0] * 10), 29)
        assert bars(drawn) == "▁" * 10 + "?" * 9 + "▁" * 10
        assert "?: could not be read" in drawn

    def test_legend_is_omitted_without_question_marks(self) -> None:
        assert "?" not in drawn_of(looks_every(1, 0.0, 0.5), 29)

    def test_partly_read_column_is_never_drawn_as_idle(self) -> None:
        drawn = drawn_of(looks_every(1, *HALF_SEEN * 29), 58)
        assert bars(drawn) == "?" * 29

    def test_partly_read_busy_column_is_busy(self) -> None:
        assert bars(drawn_of(looks_every(1, *HALF_BUSY * 29), 58)) == "█" * 29

    def test_unreadable_machine_is_unknown_on_all_gpus(self) -> None:
        looks = [a_look(0.0, 0.0, at=float(at)) for at in range(1, 20)]
        blind = a_look(at=20.0, problem=SICK)
        looks += [msgspec.structs.replace(blind, at=float(at)) for at in range(20, 30)]
        drawn = drawn_of(looks, 29)
        assert bars(drawn, 0) == bars(drawn, 1) == "▁" * 19 + "?" * 10

    def test_gpu_that_was_never_read_has_no_peak(self) -> None:
        assert drawn_of(looks_every(1, SICK, SICK), 2).splitlines()[0].split()[-1] == "?"


class TestFrame:
    def test_axis_shows_the_window_and_the_threshold(self) -> None:
        lines = drawn_of(looks_every(10, *[0.0] * 180), 1800).splitlines()
        assert lines[1].split() == ["30m", "before", "the", "end"]
        assert len(lines[1]) == len("GPU 0 ") + 29
        assert lines[2:] == ["on the right: the peak", "idle: below 1%"]

    def test_only_the_gpus_of_the_job_are_drawn_by_index(self) -> None:
        looks = [a_look(0.1, 0.2, 0.3)]
        wanted = {looks[0].gpus[2].uuid, looks[0].gpus[0].uuid}
        assert [label for label, _ in series_of(looks, wanted)] == ["GPU 0", "GPU 2"]

    def test_bars_are_aligned_behind_labels_of_different_length(self) -> None:
        looks = [a_look(*[1.0] * 11, at=float(at)) for at in range(1, 30)]
        lines = drawn_of(looks, 29).splitlines()[:11]
        assert len({line.index("█") for line in lines}) == 1
        assert {len(line) for line in lines} == {WIDTH}

    def test_chart_without_readings_has_a_note(self) -> None:
        assert chart([], 1800) == "no readings"
        assert chart([("GPU 0", [])], 1800) == "no readings"


peaks = st.one_of(st.floats(0, 1), st.just(SICK))
samples = st.builds(Sample, st.floats(0, 1e9), st.floats(0, 1e9), peaks)
labels = st.integers(0, 999).map(lambda index: f"GPU {index}")
some_series = st.lists(st.tuples(labels, st.lists(samples, max_size=20)), max_size=4)


@given(some_series, st.floats(0.1, 1e7), st.none() | st.floats(0, 1))
def test_chart_of_any_readings_fits_a_phone(
    series: list[tuple[str, list[Sample]]], window: float, below: float | None
) -> None:
    assert max(len(line) for line in chart(series, window, below=below).split("\n")) <= WIDTH


@given(
    st.lists(st.tuples(st.floats(0.1, 60), st.one_of(st.floats(0, 1), st.just(SICK))), min_size=1, max_size=200),
    st.floats(1, 10_000),
)
def test_activity_within_the_window_is_always_visible(steps: list[tuple[float, Maybe[float]]], window: float) -> None:
    at, read = 0.0, []
    for span, peak in steps:
        at += span
        read.append(Sample(at, span, peak))
    drawn = bars(chart([("GPU 0", read)], window, below=0.01))
    active = any(s.at > at - window and not isinstance(s.peak, Unknown) and s.peak > 0.01 for s in read)
    assert any(letter in "▂▃▄▅▆▇█" for letter in drawn) or not active
