"""Repositories of git with everything in them that a snapshot must keep."""

import os
import stat
import subprocess
from pathlib import Path

# Neither UTF-8 nor without surprises for a shell.
ODD_NAME = b"caf\xe9 \xff.txt"


class CodeRepository:
    """A repository with one commit."""

    def __init__(self, path: Path, files: dict[str, str]) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.write(files)
        self.commit()

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, "-c", "protocol.file.allow=always", "-C", str(self.path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a commit")
        return self.git("rev-parse", "HEAD").strip()


def everything(path: Path) -> CodeRepository:
    """Links, executable bits, odd names, submodules with changes, ignored, deleted and untracked files."""
    other = CodeRepository(path.with_name("other"), {"lib.py": "library = 1\n", "gone.py": ""})
    code = CodeRepository(
        path, {"run.sh": "echo committed\n", "kept.txt": "kept\n", "deleted.txt": "", "a dir/x": "x\n"}
    )
    code.write({".gitignore": "*.log\n/out/\n"})
    (path / "run.sh").chmod(0o755)
    (path / "inside").symlink_to("a dir/x")
    (path / "outside").symlink_to("/etc/hostname")
    (path / "dangling").symlink_to("../nowhere")
    code.git("submodule", "--quiet", "add", str(other.path), "module")
    code.commit()
    code.write(
        {
            "run.sh": "echo changed\n",
            "new.txt": "new\n",
            "noisy.log": "ignored\n",
            "out/result": "ignored\n",
            "module/lib.py": "library = 2\n",
            "module/extra.py": "",
            "embedded/own.py": "own = 1\n",
        }
    )
    (path / "deleted.txt").unlink()
    (path / "module" / "gone.py").unlink()
    subprocess.run(["git", "init", "--quiet", str(path / "embedded")], check=True)
    (path / "new.txt").chmod(0o755)
    Path(os.fsdecode(os.fsencode(path) + b"/" + ODD_NAME)).write_bytes(b"odd\n")
    (path / "line\nbreak\r").write_text("odd too\n")
    return code


EVERYTHING = {
    b".gitignore": ("-", b"*.log\n/out/\n"),
    b".gitmodules": None,
    b"a dir/x": ("-", b"x\n"),
    ODD_NAME: ("-", b"odd\n"),
    b"dangling": ("l", b"../nowhere"),
    b"embedded/own.py": ("-", b"own = 1\n"),
    b"inside": ("l", b"a dir/x"),
    b"kept.txt": ("-", b"kept\n"),
    b"line\nbreak\r": ("-", b"odd too\n"),
    b"module/extra.py": ("-", b""),
    b"module/lib.py": ("-", b"library = 2\n"),
    b"new.txt": ("x", b"new\n"),
    b"outside": ("l", b"/etc/hostname"),
    b"run.sh": ("x", b"echo changed\n"),
}
"""What a snapshot of it has: by path whether it is a link, executable or plain, and its target or content."""


def tree_at(top: Path) -> dict[bytes, tuple[str, bytes]]:
    """The files below a directory, in the form of EVERYTHING."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for path in top.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            kind, content = "l", os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            kind, content = "x" if mode & stat.S_IXUSR else "-", path.read_bytes()
        else:
            continue
        found[os.fsencode(path.relative_to(top))] = (kind, content)
    return found


def assert_everything(found: dict[bytes, tuple[str, bytes]]) -> None:
    expected = {path: found.get(path) if content is None else content for path, content in EVERYTHING.items()}
    assert found == expected
