"""The cache of fits: the same training is recognised, a different one never."""

from pathlib import Path

import msgspec
import pytest

from stoker.fit.cache import FitCache, Key, shape_of
from stoker.fit.model import Fitted, Overrides, ProbeOutcome, SearchOptions

FITTED = Fitted(
    size=64, fixed=1.0, slope=2.0, predicted=9, limit=10, observations=(ProbeOutcome(size=8, outcome="fits", peak=3),)
)


def key(**changes: object) -> Key:
    usual = Key("python train.py", "/srv", "A100", 80, SearchOptions(), Overrides())
    return msgspec.structs.replace(usual, **changes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python t.py --seed=1", "python t.py --seed=2"),
        ("python t.py --seed 1 --n 4", "python t.py --seed 99 --n 4"),
        ("python t.py --learning-rate=1e-3", "python t.py --learning-rate=3e-4"),
        ("python t.py lr=1e-3 out_dir='a b'", "python t.py lr=2 out_dir=c"),
        ("python t.py --version=8fa1", "python t.py --version=09bc"),
    ],
)
def test_seeds_rates_and_names_do_not_change_the_key(one: str, other: str) -> None:
    assert shape_of(one) == shape_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python t.py --n_layer=12", "python t.py --n_layer=24"),
        ("python t.py --model_name=gpt2", "python t.py --model_name=gpt2-xl"),
        ("python t.py --block_size 256", "python t.py --block_size 1024"),
        ("python a/train.py", "python b/train.py"),
        ("python t.py seed", "python t.py lr"),
    ],
)
def test_arguments_that_may_change_memory_change_the_key(one: str, other: str) -> None:
    assert shape_of(one) != shape_of(other)


def test_argument_list_and_shell_text_have_the_same_key() -> None:
    assert shape_of(("python", "t.py", "--seed=1")) == shape_of("python t.py --seed=2")


def test_newest_answer_is_returned_for_its_key_only(tmp_path: Path) -> None:
    cache = FitCache(tmp_path / "new")
    cache.keep(key(), FITTED)
    cache.keep(key(), msgspec.structs.replace(FITTED, size=72))
    cached = cache.find(key())
    assert cached is not None
    assert (cached.fitted.size, cached.fitted.observations) == (72, FITTED.observations)
    for other in (
        key(gpu="H100"),
        key(memory=40),
        key(search_options=SearchOptions(margin=0.2)),
        key(directory="/tmp"),
    ):
        assert cache.find(other) is None


def test_unreadable_file_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "fits.json").write_text("[{")
    cache = FitCache(tmp_path)
    assert cache.find(key()) is None
    cache.keep(key(), FITTED)
    assert cache.find(key()) is not None
