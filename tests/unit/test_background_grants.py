"""A GPU granted to background programs is free once the filler confirms the revocation."""

from stoker.engines.local.background_fill import Grants

BOTH, ONE, NONE = frozenset({"a", "b"}), frozenset({"a"}), frozenset[str]()


def test_revoked_gpu_counts_as_used_until_the_filler_confirms() -> None:
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


def test_confirmation_of_the_last_revocation_confirms_all() -> None:
    grants = Grants()
    grants.add(BOTH)
    grants.add(ONE)
    last = grants.add(NONE)
    assert grants.possible == BOTH
    grants.confirm(last)
    assert grants.possible == NONE
    assert grants.add(ONE) > last


def test_no_program_starts_without_a_filler() -> None:
    grants = Grants()
    grants.add(BOTH)
    grants.clear()
    assert grants.possible == NONE
