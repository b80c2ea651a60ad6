"""A GPU that was lent to background programs is free again when the filler has said so, not when it was told."""

from stoker.engines.local.background_fill import Grants

BOTH, ONE, NONE = frozenset({"a", "b"}), frozenset({"a"}), frozenset[str]()


def test_revoked_gpu_may_be_in_use_until_that_is_confirmed() -> None:
    grants = Grants()
    first = grants.add(BOTH)
    grants.confirm(first)
    assert grants.possible == BOTH
    second = grants.add(ONE)
    assert grants.possible == BOTH
    grants.confirm(first)
    assert grants.possible == BOTH
    grants.confirm(second)
    assert grants.possible == ONE


def test_answer_to_the_last_of_several_answers_all() -> None:
    grants = Grants()
    grants.add(BOTH)
    grants.add(ONE)
    last = grants.add(NONE)
    assert grants.possible == BOTH
    grants.confirm(last)
    assert grants.possible == NONE
    assert grants.add(ONE) > last


def test_without_a_filler_nothing_starts() -> None:
    grants = Grants()
    grants.add(BOTH)
    grants.clear()
    assert grants.possible == NONE
