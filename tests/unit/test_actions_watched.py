"""The GPUs that are watched, and which of them are called idle."""

import pytest

from stoker.actions.watched import Watched
from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown
from stoker.rules.policy import Policy
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
