"""Wheels made of what is installed here: another machine gets the code that runs, without a build or an index."""

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from stoker.errors import StokerError

# Written by the installer for its own use.
_OF_THE_INSTALLER: Final = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json"}
# The modules beside the package: programs that Stoker replaces keep their names.
_BESIDE: Final = ("gpu_idle_timeout.py", "gpu_mon.py", "gpu_sentinel.py")
_REQUIREMENT: Final = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_OF_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
# The oldest time that a zip file can hold: the same files always make the same wheel.
_NO_TIME: Final = (1980, 1, 1, 0, 0, 0)


class Wheel(NamedTuple):
    """One installed distribution, packed again."""

    name: str
    """The name of the file."""
    content: bytes

    @property
    def is_portable(self) -> bool:
        """Whether it fits any Python and platform."""
        return self.name.endswith("-none-any.whl")


def stoker_wheel() -> Wheel:
    """The Stoker that runs here, also from a checkout. Raises StokerError when it was not installed."""
    try:
        found = distribution("stoker")
    except PackageNotFoundError:
        raise StokerError(
            "this Stoker was not installed, so it cannot be copied to another machine: install it by pip or uv"
        ) from None
    return packed(found)


def dependency_wheels(extras: Iterable[str]) -> list[Wheel]:
    """What Stoker needs with these extras, as far as it is installed here."""
    return [packed(found) for found in _needed("stoker", frozenset(extras), {})]


def _needed(name: str, extras: frozenset[str], seen: dict[str, frozenset[str]]) -> Iterator[Distribution]:
    """Markers other than extras are not evaluated: what they exclude is not installed here."""
    for line in distribution(name).requires or ():
        found = _REQUIREMENT.match(line)
        if found is None:
            continue
        only_for = _OF_EXTRA.findall(found[3] or "")
        if only_for and extras.isdisjoint(only_for):
            continue
        key = re.sub(r"[-_.]+", "-", found[1]).lower()
        wanted = frozenset(filter(None, re.split(r"\s*,\s*", (found[2] or "").strip())))
        known = seen.get(key)
        if key == "stoker" or (known is not None and wanted <= known):
            continue
        seen[key] = wanted | (known or frozenset())
        try:
            dependency = distribution(found[1])
        except PackageNotFoundError:
            continue
        if known is None:
            yield dependency
        yield from _needed(found[1], seen[key], seen)


def packed(found: Distribution) -> Wheel:
    """The distribution as a wheel."""
    about = found.read_text("WHEEL")
    if about is None:
        raise StokerError(f"{found.name} was not installed from a wheel, so it cannot be copied: reinstall it")
    files = dict(sorted(_files(found)))
    info = next(name.partition("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((f"{info}/RECORD", "", ""))
    packing = io.BytesIO()
    with zipfile.ZipFile(packing, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (*files.items(), (f"{info}/RECORD", record.getvalue().encode())):
            entry = zipfile.ZipInfo(name, _NO_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if "/scripts/" in name else 0o644) << 16
            archive.writestr(entry, content)
    return Wheel(f"{info.removesuffix('.dist-info')}-{_tag(about)}.whl", packing.getvalue())


def _files(found: Distribution) -> Iterator[tuple[str, bytes]]:
    """Names inside a wheel and contents."""
    scripts = {entry.name for entry in found.entry_points if entry.group in ("console_scripts", "gui_scripts")}
    listed = found.files
    if listed is None:
        raise StokerError(
            f"the files of {found.name} are not listed, so it cannot be copied: reinstall it by pip or uv"
        )
    info = next(str(path).partition("/")[0] for path in listed if path.name == "METADATA")
    editable = any(path.suffix == ".pth" and len(path.parts) == 1 for path in listed) and found.name == "stoker"
    for path in listed:
        if path.suffix == ".pyc" or (path.parts[0] == info and path.name in _OF_THE_INSTALLER):
            continue
        if ".." not in path.parts:
            if not (editable and path.suffix == ".pth"):
                yield str(path), _content(found, path)
        elif path.name not in scripts and path.parts[-2] == "bin":
            yield f"{info.removesuffix('.dist-info')}.data/scripts/{path.name}", _content(found, path)
    if editable:
        yield from _sources(Path(__file__).parents[1])


def _content(found: Distribution, path: PurePosixPath) -> bytes:
    try:
        return Path(str(found.locate_file(str(path)))).read_bytes()
    except OSError as error:
        raise StokerError(
            f"{found.name} cannot be copied: {path} {(error.strerror or '').lower()}: reinstall it"
        ) from None


def _sources(package: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a checkout, which is where an editable installation imports from."""
    beside = (package.with_name(name) for name in _BESIDE)
    for path in (*package.rglob("*"), *beside):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(package.parent).as_posix(), path.read_bytes()


def _tag(about: str) -> str:
    """`cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64`, from the lines of WHEEL."""
    tags = [tag.split("-", 2) for tag in HeaderParser().parsestr(about).get_all("Tag", ["py3-none-any"])]
    return "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
