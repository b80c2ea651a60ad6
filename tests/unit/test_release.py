"""What `make release` refuses, and what it builds."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import REPOSITORY, load_script

release = load_script("release")

CHANGELOG = """# Changelog

## [1.2.3] - 2030-01-31

### Added

- A thing.

## [1.2.2] - 2030-01-01

- Another.
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A commit of version 1.2.3, tagged and with its changelog."""
    (tmp_path / "src/stoker").mkdir(parents=True)
    (tmp_path / "src/stoker/version.py").write_text('"""The version."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    git(tmp_path, "tag", "v1.2.3")
    return tmp_path


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, env=environment)


def commit(directory: Path) -> None:
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "a change")


def check(directory: Path) -> None:
    version = release.version_of(directory)
    release.notes_of(directory, version)
    release.check_tree(directory)
    release.check_tag(directory, version)


def test_tagged_commit_with_its_changelog_passes(repository: Path) -> None:
    check(repository)
    assert release.notes_of(repository, "1.2.3") == "### Added\n\n- A thing."


@pytest.mark.parametrize(
    ("changelog", "error"),
    [
        (CHANGELOG.replace("1.2.3", "1.3.0"), r"begins with '\[1\.3\.0\] - 2030-01-31' but the version is 1\.2\.3"),
        (CHANGELOG.replace("2030-01-31", "Unreleased"), r"give '\[1\.2\.3\] - Unreleased' the date of the release"),
        (CHANGELOG.replace("### Added\n\n- A thing.\n", ""), "is empty: say what changed"),
        ("# Changelog\n", "begins with 'no heading'"),
    ],
)
def test_mismatched_changelog_is_refused(repository: Path, changelog: str, error: str) -> None:
    (repository / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(release.ReleaseError, match=error):
        check(repository)


def test_non_numeric_version_is_refused(repository: Path) -> None:
    (repository / "src/stoker/version.py").write_text('__version__ = "next"\n')
    with pytest.raises(release.ReleaseError, match="has no version such as"):
        check(repository)


def test_uncommitted_changes_are_refused(repository: Path) -> None:
    (repository / "new.txt").touch()
    with pytest.raises(release.ReleaseError, match=r"the working tree has changes \(\?\? new\.txt, …\)"):
        check(repository)


def test_commit_without_a_tag_is_refused(repository: Path) -> None:
    git(repository, "tag", "-d", "v1.2.3")
    with pytest.raises(release.ReleaseError, match=r"has no tag: create it by git tag -a v1\.2\.3"):
        check(repository)


def test_tag_of_another_version_is_refused(repository: Path) -> None:
    git(repository, "tag", "-d", "v1.2.3")
    git(repository, "tag", "v1.2.4")
    with pytest.raises(release.ReleaseError, match=r"is tagged v1\.2\.4 but the version is 1\.2\.3"):
        check(repository)


def test_tag_on_another_commit_is_refused(repository: Path) -> None:
    (repository / "new.txt").touch()
    commit(repository)
    with pytest.raises(release.ReleaseError, match=r"the tag v1\.2\.3 is on another commit"):
        check(repository)


def test_this_version_has_a_section_in_the_changelog() -> None:
    assert f"\n## [{release.version_of(REPOSITORY)}] - " in (REPOSITORY / "CHANGELOG.md").read_text()


def test_wheel_and_sdist_are_built_with_all_files_of_src(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None and not os.environ.get("CI"):
        pytest.skip("hatchling is missing: `make test` installs it")
    version = release.version_of(REPOSITORY)
    wheel, sdist = release.build(REPOSITORY, version, tmp_path)
    assert (wheel.name, sdist.name) == (f"stoker-{version}-py3-none-any.whl", f"stoker-{version}.tar.gz")
