"""Limits on fragments, crowded folders and ambiguous class names under src; scripts/source-metrics counts them."""

from pathlib import Path

from tests.support.scripts import REPOSITORY, load_script

metrics = load_script("source-metrics")

# The most of each that src may have. Lower a number when src meets it; never raise one.
LIMITS = {
    "fragments": 0,
    "crowded_folders": 0,
    "ambiguous_classes": 0,
}


def test_src_stays_within_its_limits() -> None:
    measured = metrics.measure(REPOSITORY / "src")
    for figure, limit in LIMITS.items():
        found: list[str] = getattr(measured, figure)
        assert len(found) <= limit, f"{len(found)} {figure}, at most {limit}:\n" + "\n".join(found)


def test_short_module_with_one_importer_is_a_fragment(tmp_path: Path) -> None:
    write(tmp_path, "app/__init__.py", "")
    write(tmp_path, "app/main.py", "import app.once\nfrom app import twice\nfrom app.long import X\n")
    write(tmp_path, "app/other.py", "def f():\n    from app.twice import Y\n")
    write(tmp_path, "app/once.py", "")
    write(tmp_path, "app/twice.py", "Y = 1\n")
    write(tmp_path, "app/long.py", "X = 1\n" * 41)
    assert metrics.measure(tmp_path).fragments == ["app.once (0 lines)"]


def test_folder_with_more_than_twenty_modules_is_crowded(tmp_path: Path) -> None:
    write(tmp_path, "app/__init__.py", "")
    for number in range(20):
        write(tmp_path, f"app/m{number}.py", "")
    assert metrics.measure(tmp_path).crowded_folders == []
    write(tmp_path, "app/last.py", "")
    assert metrics.measure(tmp_path).crowded_folders == ["app (21)"]


def test_public_name_of_two_classes_is_ambiguous(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "class Session: ...\nclass _Private: ...\nclass Once: ...\n")
    write(tmp_path, "b.py", "class Session: ...\nclass _Private: ...\nSession2 = Session\n")
    assert metrics.measure(tmp_path).ambiguous_classes == ["Session: a, b"]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
