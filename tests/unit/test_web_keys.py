"""Tokens and devices: who is let in, who stays, and what the file on disk gives away."""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BadInputError, StokerError
from stoker.web.auth.key_file import Contents, KeyFile, Stamp
from stoker.web.auth.keys import Keys
from stoker.web.auth.throttle import FailureThrottle, TooManyFailuresError
from tests.support.waiting import wait_for


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "home")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_first_use_creates_an_operator_token_and_later_uses_find_it(keys: Keys, tmp_path: Path) -> None:
    token = keys.first()
    assert token.role == "operator"
    assert len(token.secret) >= 32
    assert Keys(tmp_path / "home").first() == token


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_token_file_is_private_regardless_of_the_umask(tmp_path: Path, umask: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    keys = Keys(home)
    before = os.umask(umask)
    try:
        keys.first()
    finally:
        os.umask(before)
    assert mode_of(keys.path) == 0o600


def test_token_file_is_private_while_it_is_written(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    replace = os.replace

    def looking(fresh: str, target: Path) -> None:
        seen.append(mode_of(Path(fresh)))
        replace(fresh, target)

    def opening(path: Path, flags: int, mode: int = 0o777) -> int:
        assert not flags & os.O_CREAT or mode == 0o600, f"{path} is made for others"
        return really_open(path, flags, mode)

    really_open = os.open
    monkeypatch.setattr(os, "replace", looking)
    monkeypatch.setattr(os, "open", opening)
    keys.first()
    assert seen == [0o600]


def test_valid_token_logs_a_device_in_and_an_invalid_one_does_not(keys: Keys) -> None:
    token = keys.add("phone", "viewer")
    assert keys.log_in("stk_nonsense") is None
    assert keys.log_in("") is None
    assert keys.by_token(token.secret + "x") is None
    entered = keys.log_in(f" {token.secret}\n", "Mozilla/5.0 (\x1b[31mPhone)" + "x" * 500)
    assert entered is not None
    user, cookie = entered
    assert (user.role, user.name) == ("viewer", "phone")
    assert keys.by_session(cookie) == user
    (session,) = keys.sessions()
    assert "\x1b" not in session.agent
    assert len(session.agent) <= 120


def test_token_file_does_not_contain_cookie_secrets(keys: Keys) -> None:
    entered = keys.log_in(keys.first().secret)
    assert entered is not None
    assert entered[1] not in keys.path.read_text()


def test_logout_ends_one_session_only(keys: Keys, tmp_path: Path) -> None:
    token = keys.first()
    one, other = keys.log_in(token.secret), keys.log_in(token.secret)
    assert one is not None
    assert other is not None
    keys.log_out(one[1])
    assert keys.by_session(one[1]) is None
    assert not keys.still_valid(one[0])
    assert keys.by_session(other[1]) is not None
    assert Keys(tmp_path / "home").by_session(one[1]) is None
    assert keys.by_token(token.secret) is not None


def test_revocation_by_another_process_takes_effect_within_a_second(keys: Keys, tmp_path: Path) -> None:
    token = keys.first()
    entered, program = keys.log_in(token.secret), keys.by_token(token.secret)
    assert entered is not None
    assert program is not None
    revoked, devices = Keys(tmp_path / "home").revoke(token.id)
    assert (revoked.id, devices) == (token.id, 1)
    revoked_at = asked_at = time.monotonic()
    while keys.by_session(entered[1]) is not None:
        assert asked_at < revoked_at + 1.0, "a revoked device is still let in after a second"
        time.sleep(0.01)
        asked_at = time.monotonic()
    assert not keys.still_valid(entered[0])
    assert not keys.still_valid(program)
    assert keys.by_token(token.secret) is None
    assert keys.log_in(token.secret) is None


def test_token_created_by_another_process_is_valid_at_once(keys: Keys, tmp_path: Path) -> None:
    keys.first()
    assert keys.by_token("stk_wrong") is None
    assert keys.by_token(Keys(tmp_path / "home").add("phone", "viewer").secret) is not None


def test_token_file_readable_by_others_is_refused_with_advice(keys: Keys) -> None:
    secret = keys.first().secret
    keys.path.chmod(0o640)
    with pytest.raises(StokerError, match=r"other users can read .* run `chmod 600 "):
        keys.tokens()
    assert keys.by_token(secret) is None
    assert keys.problem is not None
    keys.path.chmod(0o600)
    assert keys.by_token(secret) is not None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"tokens": [{"id": 3}]}', b"\xff\xfe"])
def test_invalid_token_file_is_reported_and_refuses_logins(keys: Keys, text: bytes) -> None:
    secret = keys.first().secret
    keys.path.write_bytes(text)
    with pytest.raises(StokerError, match=r"is not a valid token file") as caught:
        keys.tokens()
    assert "\n" not in str(caught.value)
    assert keys.log_in(secret) is None
    with pytest.raises(StokerError):
        keys.add("another", "viewer")
    assert keys.path.read_bytes() == text, "what a person may mend was overwritten"


def test_full_disk_prevents_neither_login_nor_logout(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = keys.first()
    old = keys.log_in(token.secret)
    assert old is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as without_room:
        without_room.setattr(KeyFile, "write", full)
        entered = keys.log_in(token.secret)
        assert entered is not None
        assert keys.by_session(entered[1]) is not None
        keys.log_out(old[1])
        assert keys.by_session(old[1]) is None
        with pytest.raises(StokerError, match=r"cannot write .*: No space left on device"):
            keys.add("phone", "viewer")
        assert Keys(tmp_path / "home").by_session(entered[1]) is None
    # With room again, the next that is written takes all of it along.
    keys.add("phone", "viewer")
    again = Keys(tmp_path / "home")
    assert again.by_session(entered[1]) is not None
    assert again.by_session(old[1]) is None


def test_unwritten_session_ends_with_its_token(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = keys.first()
    with monkeypatch.context() as without_lock:
        without_lock.setattr(KeyFile, "locked", _nobody_can_lock)
        entered = keys.log_in(token.secret)
    assert entered is not None
    keys.revoke(token.id)
    assert keys.by_session(entered[1]) is None


def _nobody_can_lock(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_last_use_is_rarely_written(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = keys.log_in(keys.first().secret)
    assert entered is not None
    begun = keys.sessions()[0].seen
    written = keys.path.stat().st_ino
    monkeypatch.setattr(time, "time", lambda: begun + 100)
    for _ in range(50):
        keys.by_session(entered[1])
    assert keys.path.stat().st_ino == written
    assert keys.sessions()[0].seen == begun + 100
    _visit_after_a_while(keys, entered[1])
    wait_for(lambda: keys.path.stat().st_ino != written, named="the visit being written")
    assert Keys(tmp_path / "home").sessions()[0].seen == begun + 100


def _visit_after_a_while(keys: Keys, cookie: str) -> None:
    """The first visit after five minutes is the one that is written down."""
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as later:
        later.setattr(time, "monotonic", lambda: now + 301)
        assert keys.by_session(cookie) is not None


@contextlib.contextmanager
def disk_that_hangs() -> Iterator[threading.Event]:
    """Nothing is written before the block ends, and what is in it must not wait for that. The event is set when
    somebody writes."""
    waiting, over = threading.Event(), threading.Event()
    write = KeyFile.write

    def hanging(file: KeyFile, contents: Contents) -> Stamp:
        waiting.set()
        assert over.wait(30), "the disk was waited for"
        return write(file, contents)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeyFile, "write", hanging)
        try:
            yield waiting
        finally:
            over.set()


def test_request_does_not_wait_for_writing_the_last_use(keys: Keys) -> None:
    entered = keys.log_in(keys.first().secret)
    assert entered is not None
    written = keys.path.stat().st_ino
    with disk_that_hangs() as waiting:
        _visit_after_a_while(keys, entered[1])
        assert waiting.wait(60), "the visit is not written at all"
    wait_for(lambda: keys.path.stat().st_ino != written, named="the visit being written")


def test_slow_login_does_not_block_other_requests(keys: Keys) -> None:
    token = keys.first()
    entered = keys.log_in(token.secret)
    assert entered is not None
    newcomer = threading.Thread(target=keys.log_in, args=(token.secret,))
    with disk_that_hangs() as waiting:
        newcomer.start()
        assert waiting.wait(60)
        assert keys.by_session(entered[1]) is not None
        assert keys.by_token(token.secret) is not None
        assert keys.by_token("stk_wrong") is None
        assert keys.still_valid(entered[0])
        assert keys.problem is None
    newcomer.join()
    assert len(keys.sessions()) == 2


def test_device_limit_of_a_token_does_not_affect_other_tokens(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = keys.log_in(keys.first().secret)
    shared = keys.add("shared", "viewer").secret
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 51 of them would take a while
    devices = [keys.log_in(shared) for _ in range(51)]
    assert operator is not None
    assert keys.by_session(operator[1]) is not None
    assert [device is not None and keys.by_session(device[1]) is not None for device in devices] == [False] + [
        True
    ] * 50


def test_simultaneous_writers_lose_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"

    def add(who: int) -> None:
        keys = Keys(home)
        for number in range(5):
            keys.add(f"{who}-{number}", "viewer")

    threads = [threading.Thread(target=add, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = Keys(home).tokens()
    assert len({token.name for token in tokens}) == len({token.id for token in tokens}) == 15
    assert [path.name for path in sorted(home.iterdir())] == [".tokens.json.lock", "tokens.json"]


def test_expired_cookie_is_refused(keys: Keys) -> None:
    entered = keys.log_in(keys.first().secret)
    assert entered is not None
    contents = msgspec.json.decode(keys.path.read_bytes())
    contents["sessions"][0]["created"] -= 401 * 24 * 3600
    keys.path.write_bytes(msgspec.json.encode(contents))
    assert Keys(keys.path.parent).by_session(entered[1]) is None


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 61, "\x1b[31m"])
def test_token_name_with_control_characters_is_refused(keys: Keys, name: str) -> None:
    with pytest.raises(BadInputError, match="a token's name must have"):
        keys.add(name, "viewer")


def test_duplicate_token_name_is_refused(keys: Keys) -> None:
    keys.add("phone", "viewer")
    with pytest.raises(BadInputError, match="there is already a token named 'phone'"):
        keys.add("phone", "operator")


# How many wrong tokens are listened to


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_address_with_many_wrong_tokens_is_throttled() -> None:
    clock = Clock()
    patience = FailureThrottle(clock)
    for _ in range(10):
        patience.failed("192.0.2.1")
    with pytest.raises(TooManyFailuresError) as caught:
        patience.failed("192.0.2.1")
    assert caught.value.seconds == 30
    patience.failed("192.0.2.2")
    clock.now = 30.0
    patience.failed("192.0.2.1")


def test_wrong_tokens_from_many_addresses_are_throttled() -> None:
    clock = Clock()
    patience = FailureThrottle(clock)
    for number in range(200):
        patience.failed(f"192.0.2.{number}")
    with pytest.raises(TooManyFailuresError):
        patience.failed("198.51.100.1")
    clock.now = 10.0
    patience.failed("198.51.100.3")


def test_throttle_memory_is_bounded() -> None:
    patience = FailureThrottle(Clock())
    for number in range(5000):
        try:
            patience.failed(str(number))
        except TooManyFailuresError:
            continue
    assert len(patience._by_address) == 4096
