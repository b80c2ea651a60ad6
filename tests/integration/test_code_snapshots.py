"""Snapshots of code: packed consistently, stored once, unpacked without leaving their directory."""

import io
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import queue as queue_package
from stoker.client import Queue
from stoker.engines import code as engine_code
from stoker.engines.code import fetch, tidy_archives, unpack_code, with_code
from stoker.errors import BadInputError, QueueAwayError, StokerError
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.code import packing
from stoker.queue.code.archive import Blob, CodeSnapshot, Packer, Unpacker, unpack
from stoker.queue.code.packing import pack
from stoker.web.submission import jobs_of
from tests.support.code_repository import CodeRepository, assert_everything, everything, tree_at
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import end

__all__ = ["queue", "url"]

LIMIT = 50 * 2**20


_made: list[Blob] = []


@pytest.fixture(autouse=True)
def _blobs_are_closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().file.close()


def blob_of(*contents: bytes) -> Blob:
    with Packer() as packer:
        for content in contents:
            packer.write(content)
        _made.append(packer.blob())
    return _made[-1]


def job_with(*blobs: Blob) -> JobSpec:
    code = CodeSnapshot(digest=blobs[0].digest, size=1, files=1, changes=blobs[1].digest if blobs[1:] else "")
    return JobSpec(command="true", snapshot=True, code=code)


def stored(blob: Blob) -> list[bytes]:
    blob.file.seek(0)
    return [blob.file.read()]


def unpacked(directory: Path, to: Path) -> dict[bytes, tuple[str, bytes]]:
    with pack(str(directory), LIMIT) as packed:
        to.mkdir()
        unpack(Unpacker(packed.code.digest, stored(packed.blobs[0])), to)
    return tree_at(to)


class TestPacking:
    def test_everything_survives_and_has_one_digest(self, tmp_path: Path) -> None:
        code = everything(tmp_path / "code")
        assert_everything(unpacked(code.path, tmp_path / "to"))
        with pack(str(code.path), LIMIT) as one, pack(str(code.path / "a dir"), LIMIT) as other:
            assert (one.code.digest, one.code.changes) == (other.code.digest, other.code.changes)
            assert (one.code.directory, other.code.directory) == ("", "a dir")
            assert (one.code.files, one.code.changed, one.code.untracked) == (14, 3, 5)

    def test_same_files_have_the_same_digest_anywhere_and_after_a_commit(self, tmp_path: Path) -> None:
        here, there = CodeRepository(tmp_path / "a", {"x": "1"}), CodeRepository(tmp_path / "b" / "c", {"x": "2"})
        there.write({"x": "1"})
        with pack(str(here.path), LIMIT) as one, pack(str(there.path), LIMIT) as other:
            assert one.code.digest == other.code.digest
            assert (one.code.changes == "", other.code.changes == "") == (True, False)
        there.commit()
        with pack(str(there.path), LIMIT) as committed:
            assert (committed.code.digest, committed.code.changes) == (one.code.digest, "")

    def test_files_behind_a_link_in_place_of_a_directory_are_left_out(self, tmp_path: Path) -> None:
        code = CodeRepository(tmp_path / "code", {"part/x": "x"})
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "x").write_text("secret")
        (code.path / "part" / "x").unlink()
        (code.path / "part").rmdir()
        (code.path / "part").symlink_to(tmp_path / "elsewhere")
        found = unpacked(code.path, tmp_path / "to")
        assert found == {b"part": ("l", os.fsencode(tmp_path / "elsewhere"))}

    def test_sparse_checkout_is_packed_as_it_is(self, tmp_path: Path) -> None:
        code = CodeRepository(tmp_path / "code", {"in/x": "x", "out/y": "y"})
        code.git("sparse-checkout", "set", "in")
        with pack(str(code.path), LIMIT) as packed:
            assert (packed.code.files, packed.code.changes) == (1, "")

    def test_ignored_directory_is_refused_as_the_place_of_the_job(self, tmp_path: Path) -> None:
        code = CodeRepository(tmp_path / "code", {"x": "x", ".gitignore": "out\n", "out/x": "x"})
        with pytest.raises(BadInputError, match="would have nothing in out, where the job runs"):
            pack(str(code.path / "out"), LIMIT)

    @pytest.mark.parametrize("changes", ["once", "always"])
    def test_file_that_changes_meanwhile_is_never_torn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: str
    ) -> None:
        code = CodeRepository(tmp_path / "code", {"a": "1", "b": "1"})
        really, count = packing._add, 0

        def add(writer: object, file: object, path: bytes) -> None:
            nonlocal count
            really(writer, file, path)  # type: ignore[arg-type]
            if path.endswith(b"/a") and (changes == "always" or not count):
                count += 1
                code.write({"a": str(count + 1), "b": str(count + 1)})

        monkeypatch.setattr(packing, "_add", add)
        if changes == "always":
            with pytest.raises(BadInputError, match=r"^a in .* changes while it is packed: try again"):
                pack(str(code.path), LIMIT)
        else:
            assert unpacked(code.path, tmp_path / "to") == {b"a": ("-", b"2"), b"b": ("-", b"2")}


def archive_of(*infos: tuple[str, bytes, str]) -> tuple[str, list[bytes]]:
    """An archive as nobody should make it: names, types and contents or targets."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        for name, kind, content in infos:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            else:
                info.linkname = content
            writer.addfile(info, io.BytesIO(content.encode()))
    blob = blob_of(tar.getvalue())
    return blob.digest, stored(blob)


class TestUnpacking:
    @pytest.mark.parametrize(
        "entries",
        [
            [("../out", tarfile.REGTYPE, "x")],
            [("{outside}/out", tarfile.REGTYPE, "x")],
            [("a/../../out", tarfile.REGTYPE, "x")],
            [("a", tarfile.SYMTYPE, "{outside}"), ("a/out", tarfile.REGTYPE, "x")],
            [("a", tarfile.SYMTYPE, "{outside}"), ("a/b", tarfile.SYMTYPE, "x")],
            [("a", tarfile.SYMTYPE, "{outside}/out"), ("a", tarfile.REGTYPE, "x")],
            [("a", tarfile.REGTYPE, "x"), ("a", tarfile.REGTYPE, "y")],
            [("out", tarfile.LNKTYPE, "{outside}/there")],
            [("out", tarfile.FIFOTYPE, "")],
        ],
    )
    def test_nothing_is_written_outside(self, tmp_path: Path, entries: list[tuple[str, bytes, str]]) -> None:
        outside, to = tmp_path / "outside", tmp_path / "inside" / "to"
        outside.mkdir()
        to.mkdir(parents=True)
        (outside / "there").write_text("there")
        named = [(n.format(outside=outside), kind, c.format(outside=outside)) for n, kind, c in entries]
        with pytest.raises((StokerError, OSError)):
            unpack(Unpacker(*archive_of(*named)), to)
        assert [path.name for path in outside.iterdir()] == ["there"]
        assert [path.name for path in to.parent.iterdir()] == ["to"]

    def test_damaged_or_cut_archive_is_refused(self, tmp_path: Path) -> None:
        digest, (data,) = archive_of(("a", tarfile.REGTYPE, "content" * 1000))
        other, (whole,) = archive_of(("b", tarfile.REGTYPE, "content"))
        for number, chunks in enumerate(([data[:-9]], [b"no archive"], [], [whole])):
            (tmp_path / str(number)).mkdir()
            with pytest.raises(StokerError, match=f"the snapshot {digest[:12]} is damaged: submit the job again"):
                unpack(Unpacker(digest, chunks), tmp_path / str(number))
        assert other != digest

    def test_memory_stays_small_for_content_that_grows_a_thousandfold(self) -> None:
        blob = blob_of(*(bytes(2**20) for _ in range(64)))
        source, longest, total = Unpacker(blob.digest, stored(blob)), 0, 0
        while data := source.read():
            longest, total = max(longest, len(data)), total + len(data)
        source.finish()
        assert (total, longest <= 2**18) == (64 * 2**20, True)

    def test_paths_of_the_repository_are_moved_in_pythonpath(self) -> None:
        code = CodeSnapshot(digest="", size=0, files=0, root="/home/me/code")
        environment = {"PYTHONPATH": "/home/me/code/src:/home/me/codec:/home/me/code", "PATH": "/home/me/code/bin"}
        assert with_code(environment, code, Path("/at")) == {
            "PYTHONPATH": "/at/src:/home/me/codec:/at",
            "PATH": "/home/me/code/bin",
        }


class TestStore:
    def test_content_is_stored_once_in_rows_of_limited_size(self, queue: Store) -> None:
        content = os.urandom(2**20) * 3 + os.urandom(5 * 2**19)
        blob = blob_of(content)
        for again in (blob, blob_of(content)):
            queue.jobs.submit([job_with(again)] * 3, [again])
        rows = queue._driver.fetch_text(
            "SELECT digest, number, length(data) FROM stoker_blob_chunks ORDER BY number", {}
        )
        assert [(digest, number) for digest, number, _ in rows] == [
            (blob.digest, number) for number in range(len(rows))
        ]
        assert max(size for _, _, size in rows) == 2**20
        assert len(rows) >= 3
        source = queue.blobs.read(blob.digest)
        assert source.read_all() == content
        source.finish()

    def test_blob_is_deleted_with_the_last_job_that_refers_to_it(self, queue: Store) -> None:
        first, second, both = blob_of(b"first"), blob_of(b"second"), blob_of(b"both")
        one, other = queue.jobs.submit([job_with(first, both), job_with(second, both)], [first, second, both])
        end(queue, one)
        assert (queue.jobs.clean(-1.0), queue.blobs.forget_unused()) == (1, (1, first.size))
        assert queue.blobs.read(both.digest).read_all() == b"both"
        with pytest.raises(StokerError, match=r"is not in the queue .* any more: submit the job again"):
            queue.blobs.read(first.digest).read_all()
        end(queue, other)
        assert (queue.jobs.clean(-1.0), queue.blobs.forget_unused()) == (1, (2, second.size + both.size))

    def test_refused_submission_stores_nothing(self, queue: Store) -> None:
        blob = blob_of(b"content")
        with pytest.raises(BadInputError, match="cannot come after"):
            queue.jobs.submit([job_with(blob), JobSpec(command="true", after=("00000000",))], [blob])
        with pytest.raises(BadInputError, match="is not in the queue"):
            queue.jobs.submit([job_with(blob)])
        assert queue.jobs.counts() == {}

    def test_submission_during_a_clean_finds_its_blob(self, queue: Store, url: str) -> None:
        blob = blob_of(b"content")
        (job,) = queue.jobs.submit([job_with(blob)], [blob])
        end(queue, job)
        queue.jobs.clean(-1.0)
        submitted: list[str] = []

        def submit() -> None:
            again = blob_of(b"content")
            with init_queue(url) as other:
                submitted.extend(other.jobs.submit([job_with(again)], [again]))

        thread = threading.Thread(target=submit)

        def clean() -> None:
            assert queue.blobs._forget_some() == [blob.size]
            thread.start()
            thread.join(0.3)  # it waits for this transaction, or is not that far
            assert not submitted

        queue._driver.transaction(clean)
        thread.join(30)
        assert len(submitted) == 1
        assert queue.blobs.read(blob.digest).read_all() == b"content"
        assert queue.blobs.forget_unused() == (0, 0)


class TestOnAMachine:
    def submitted(self, url: str, tmp_path: Path) -> CodeSnapshot:
        """With a connection that is closed: SQLite's must not be open in a process that forks."""
        with (
            init_queue(url) as queue,
            pack(str(CodeRepository(tmp_path / "code", {"x": "content"}).path), LIMIT) as packed,
        ):
            queue.jobs.submit([JobSpec(command="true", snapshot=True, code=packed.code)], packed.blobs)
            return packed.code

    def test_archive_is_brought_once_and_replaced_when_damaged(self, url: str, tmp_path: Path) -> None:
        code = self.submitted(url, tmp_path)
        attempt = tmp_path / "home" / "attempts" / "a-1"
        attempt.mkdir(parents=True)
        to = attempt / "code"
        assert unpack_code(code, url, attempt, to, lambda: None) == str(to)
        assert (to / "x").read_text() == "content"
        shutil.rmtree(to)
        unpack_code(code, "/nowhere/queue.db", attempt, to, lambda: None)  # the second time without the queue
        shutil.rmtree(to)
        kept = tmp_path / "home" / "snapshots" / code.digest
        kept.write_bytes(b"damaged")
        with pytest.raises(StokerError, match="is damaged"):
            unpack_code(code, url, attempt, to, lambda: None)
        assert not to.exists()
        unpack_code(code, url, attempt, to, lambda: None)
        assert (to / "x").read_text() == "content"

    def test_unpacking_waits_for_an_unreachable_queue_and_can_be_stopped(
        self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = self.submitted(url, tmp_path)
        attempt = tmp_path / "home" / "attempts" / "a-1"
        attempt.mkdir(parents=True)
        flag = tmp_path / "back"

        def open_queue(address: str) -> Store:
            if not flag.exists():
                raise QueueAwayError("it is away")
            return queue_package.open_queue(address)

        class StopError(Exception): ...

        def stop() -> None:
            raise StopError

        monkeypatch.setattr(engine_code, "open_queue", open_queue)
        monkeypatch.setattr(engine_code, "_FIRST_PAUSE", 0.01)
        with pytest.raises(StopError):
            unpack_code(code, url, attempt, attempt / "code", stop)
        unpack_code(code, url, attempt, attempt / "code", flag.touch)
        assert (attempt / "code" / "x").exists()

    def test_machine_keeps_the_archives_it_used_last(self, tmp_path: Path) -> None:
        place = tmp_path / "snapshots"
        place.mkdir()
        for number in range(20):
            (place / str(number)).touch()
            os.utime(place / str(number), (2e9 + number, 2e9 + number))
        (place / "old").touch()
        os.utime(place / "old", (1, 1))
        tidy_archives(tmp_path)
        assert {path.name for path in place.iterdir()} == {str(number) for number in range(4, 20)}

    def test_archive_that_is_kept_is_opened_without_the_queue(self, tmp_path: Path) -> None:
        (tmp_path / "snapshots").mkdir()
        (tmp_path / "snapshots" / "digest").write_bytes(b"kept")
        with fetch("/nowhere/queue.db", tmp_path, "digest") as archive:
            assert archive.read() == b"kept"


def test_python_client_submits_and_compares_snapshots(tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"train.py": "first\n", "key.pem": ""})
    code.write({"train.py": "second\n"})
    with Queue() as client:
        with pytest.warns(UserWarning, match=r"the snapshot contains key\.pem"):
            job = client.submit("python train.py", directory=code.path, snapshot=True)
        (code.path / "key.pem").unlink()
        code.write({"train.py": "third\n"})
        other = client.submit("python train.py", directory=code.path, snapshot=True)
        assert "-first\n+second\n" in client.diff(job)
        assert "-second\n+third\n" in client.diff(job, other)


def test_copy_of_a_job_from_the_page_keeps_its_snapshot(queue: Store, tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"x": "1"})
    with pack(str(code.path), LIMIT) as packed:
        asked = JobSpec(command="true", directory=str(code.path), snapshot=True, code=packed.code, commit=packed.commit)
        (job,) = queue.jobs.submit([asked], packed.blobs)
    (copy,) = jobs_of(queue, {"again": job, "priority": 5})
    assert (copy.snapshot, copy.code, copy.commit) == (True, packed.code, packed.commit)
    (elsewhere,) = jobs_of(queue, {"again": job, "directory": str(tmp_path)})
    assert (elsewhere.snapshot, elsewhere.code) == (False, None)
