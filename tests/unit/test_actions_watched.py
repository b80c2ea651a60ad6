"""The GPUs that are watched, and which of them are called idle."""

import pytest

from stoker.actions.watched import IdleGpus, Watched
from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown
from stoker.verdicts.policy import Policy
from stoker.verdicts.verdict import Activity
from tests.support.looks import a_look


def labels(watched: Watched, look: Look) -> list[str]:
    return [activity.label for activity in watched.activities(look)]


def test_gpus_that_cannot_be_seen_at_the_start_are_chosen_later() -> None:
    watched = Watched("1", Policy(), {})
    assert labels(watched, a_look(problem=Unknown("the driver did not answer in 5 s"))) == []
    assert labels(watched, a_look(0.0, 0.0)) == ["GPU 1"]


def test_visible_follows_the_environment() -> None:
    assert labels(Watched("visible", Policy(), {"CUDA_VISIBLE_DEVICES": "1"}), a_look(0.0, 0.0)) == ["GPU 1"]


@pytest.mark.parametrize(
    ("chosen", "policy", "environment", "sentence"),
    [
        ("5", Policy(), {}, "there is no GPU 5 here"),
        ("visible", Policy(), {"CUDA_VISIBLE_DEVICES": ""}, "--gpus visible: there is no such GPU here"),
        ("all", Policy(require=3), {}, "--require 3 can never be: only 2 GPU(s) are watched"),
        ("0", Policy(require=2), {}, "only 1 GPU(s) are watched"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(
    chosen: str, policy: Policy, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(BadInputError) as error:
        Watched(chosen, policy, environment).activities(a_look(0.0, 0.0))
    assert sentence in str(error.value)


def test_a_gpu_that_is_lost_later_is_no_mistake_of_the_person() -> None:
    watched = Watched("all", Policy(require=2), {})
    assert labels(watched, a_look(0.0, 0.0)) == ["GPU 0", "GPU 1"]
    after = watched.activities(a_look(0.0))
    assert [activity.label for activity in after if isinstance(activity.peak, Unknown)] == ["GPU 1"]


def test_only_gpus_that_were_idle_for_the_whole_window_are_called_idle() -> None:
    policy = Policy(window=10, every=1, after=0, require="any", arm_above=0.9)
    idle = IdleGpus(policy, 0.0)
    for second in range(1, 11):
        late = 0.5 if second < 8 else 0.0
        found = idle.observe(float(second), [Activity("A", "GPU 0", 1.0, 0.0), Activity("B", "GPU 1", 1.0, late)])
        assert found == (("A",) if second == 10 else ())
    idle.start_over(10.0)
    assert idle.observe(19.0, [Activity("A", "GPU 0", 9.0, 0.0)]) == ()
    assert idle.observe(20.0, [Activity("A", "GPU 0", 1.0, 0.0)]) == ("A",)
