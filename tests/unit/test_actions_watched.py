"""Selection of the watched GPUs, and which of them are idle."""

import pytest

from stoker.actions import watcher
from stoker.actions.whose import judged_processes
from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown
from stoker.rules.idle import IdlePolicy
from stoker.runs.processes.usage import ProcessUsage
from tests.support.looks import a_look


class Watched(watcher.Watched):
    """Everyone's processes on these GPUs, whatever they do on the CPU."""

    def __init__(self, chosen: str, policies: list[IdlePolicy], environment: dict[str, str]) -> None:
        super().__init__(chosen, policies, environment, judged_processes("all", (), "root"), lambda *_: ProcessUsage())


def labels(watched: Watched, look: Look) -> list[str]:
    return [activity.label for activity in watched.observe(look).activities]


def test_unreadable_gpus_at_startup_are_selected_later() -> None:
    watched = Watched("1", [IdlePolicy()], {})
    assert labels(watched, a_look(problem=Unknown("the driver did not answer in 5 s"))) == []
    assert labels(watched, a_look(0.0, 0.0)) == ["GPU 1"]


def test_visible_follows_the_environment() -> None:
    assert labels(Watched("visible", [IdlePolicy()], {"CUDA_VISIBLE_DEVICES": "1"}), a_look(0.0, 0.0)) == ["GPU 1"]


@pytest.mark.parametrize(
    ("chosen", "policy", "environment", "sentence"),
    [
        ("5", IdlePolicy(), {}, "there is no GPU 5 here"),
        ("visible", IdlePolicy(), {"CUDA_VISIBLE_DEVICES": ""}, "--gpus visible: there is no such GPU here"),
        ("all", IdlePolicy(require=3), {}, "--require 3 can never be: only 2 GPU(s) are watched"),
        ("0", IdlePolicy(require=2), {}, "only 1 GPU(s) are watched"),
    ],
)
def test_invalid_selection_is_refused(
    chosen: str, policy: IdlePolicy, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(BadInputError) as error:
        Watched(chosen, [policy], environment).observe(a_look(0.0, 0.0))
    assert sentence in str(error.value)


def test_gpu_lost_later_is_unknown() -> None:
    watched = Watched("all", [IdlePolicy(require=2)], {})
    assert labels(watched, a_look(0.0, 0.0)) == ["GPU 0", "GPU 1"]
    after = watched.observe(a_look(0.0)).activities
    assert [activity.label for activity in after if isinstance(activity.peak, Unknown)] == ["GPU 1"]
