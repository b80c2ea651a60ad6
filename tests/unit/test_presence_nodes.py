"""Device nodes of GPUs, on machines made of plain files."""

import os
from pathlib import Path

import pytest

from stoker.gpus.model import Gpu, Maybe, Unknown
from stoker.gpus.visible import device_nodes
from stoker.presence.holders import identity
from tests.support.fake_drm import FakeCard, FakeMachine


def gpu(
    uuid: str,
    *,
    vendor: str = "nvidia",
    minor: Maybe[int] = 0,
    bus: Maybe[str] = "0000:01:00.0",
    parent: str | None = None,
) -> Gpu:
    return Gpu(uuid, 0, "Some GPU", vendor, minor, 2**30, bus, parent)


def test_nvidia_node_is_named_by_the_minor_number_even_before_it_exists(tmp_path: Path) -> None:
    assert device_nodes([gpu("GPU-a", minor=3)], tmp_path) == {"GPU-a": (tmp_path / "dev/nvidia3",)}


def test_slices_have_the_node_of_their_parent_gpu(tmp_path: Path) -> None:
    unknown = Unknown("not reported for slices")
    gpus = [
        gpu("GPU-a", minor=2),
        gpu("MIG-1", minor=unknown, parent="GPU-a"),
        gpu("MIG-2", minor=2, parent="GPU-b"),
    ]
    node = (tmp_path / "dev/nvidia2",)
    assert device_nodes(gpus, tmp_path) == {"GPU-a": node, "MIG-1": node, "MIG-2": node}


def test_gpu_with_an_unknown_node_has_none(tmp_path: Path) -> None:
    unknown = Unknown("not reported")
    gpus = [gpu("GPU-a", minor=unknown), gpu("GPU-b", vendor="amd", bus=unknown), gpu("GPU-c", vendor="intel")]
    assert device_nodes(gpus, tmp_path) == {"GPU-a": (), "GPU-b": (), "GPU-c": ()}


def test_simulated_gpu_has_a_node_only_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia7").touch()
    gpus = [gpu("GPU-a", vendor="sim", minor=7), gpu("GPU-b", vendor="sim", minor=8)]
    assert device_nodes(gpus, tmp_path) == {"GPU-a": (tmp_path / "dev/nvidia7",), "GPU-b": ()}


def test_amd_and_intel_nodes_are_found_by_pci_address(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    FakeCard(machine, 0, "0000:03:00.0", "0x1002", "0x73bf")
    FakeCard(machine, 1, "0000:00:02.0", "0x8086", "0x9a49")
    gpus = [gpu("GPU-i", vendor="intel", bus="0000:00:02.0"), gpu("GPU-a", vendor="amd", bus="0000:03:00.0")]
    dri = tmp_path / "dev/dri"
    assert device_nodes(gpus, tmp_path) == {
        "GPU-i": (dri / "card1", dri / "renderD129"),
        "GPU-a": (dri / "card0", dri / "renderD128"),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_nodes_with_one_device_number_are_equal_and_plain_files_are_not(tmp_path: Path) -> None:
    for name in ("here", "in-a-container"):
        os.mknod(tmp_path / name, 0o600 | 0o020000, os.makedev(1, 5))
    assert identity((tmp_path / "here").stat()) == identity((tmp_path / "in-a-container").stat())
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    assert identity((tmp_path / "a").stat()) != identity((tmp_path / "b").stat())
