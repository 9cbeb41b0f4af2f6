"""The memory limits of containers: simulated ones, and one that the kernel enforces."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.unit.manual import CPU
from weightsync import Sender
from weightsync.errors import TransferFailed
from weightsync.memory import arenas, cgroups
from weightsync.testing import ReferenceEngine

MIB = 1 << 20
#: Files of a group: its limit, its usage, and the key in memory.stat of the file cache that the kernel reclaims first.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


class Tree:
    """The files of a host that describe its control groups."""

    def __init__(self, root, own, *mounts):
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in own))
        lines = [f"{number} 1 0:{number} {mount}\n" for number, mount in enumerate(mounts, start=30)]
        (root / "proc/self/mountinfo").write_text("25 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))

    def group(self, path, limit, used, inactive=0, names=V2):
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names[:2], (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\nfile 2\n")

    def free(self):
        return cgroups.free_bytes(self.root)


UNIFIED = "/ /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_free_memory_is_the_limit_less_usage_plus_reclaimable_files(tmp_path):
    tree = Tree(tmp_path, ["0::/"], UNIFIED)
    tree.group("sys/fs/cgroup", 100 * MIB, 70 * MIB, inactive=10 * MIB)
    assert tree.free() == 40 * MIB


@pytest.mark.parametrize(("outer", "inner", "free"), [(50, 80, 20), (80, 50, 20), ("max", 50, 20), (50, "max", 20)])
def test_the_tightest_limit_of_the_ancestors_counts(tmp_path, outer, inner, free):
    def nbytes(limit):
        return limit if limit == "max" else limit * MIB

    tree = Tree(tmp_path, ["0::/pod/engine"], UNIFIED)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)  # the root group has no such files
    tree.group("sys/fs/cgroup/pod", nbytes(outer), 30 * MIB)
    tree.group("sys/fs/cgroup/pod/engine", nbytes(inner), 30 * MIB)
    assert tree.free() == free * MIB


def test_a_cgroup_v1_container_finds_its_group_at_the_mount_root(tmp_path):
    here = "/sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory"
    tree = Tree(tmp_path, ["5:memory:/docker/abc", "4:cpu:/docker/abc"], f"/docker/abc {here}")
    tree.group("sys/fs/cgroup/memory", 60 * MIB, 50 * MIB, inactive=5 * MIB, names=V1)
    assert tree.free() == 15 * MIB


def test_cgroup_v1_and_v2_side_by_side(tmp_path):
    first = "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    second = "/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    tree = Tree(tmp_path, ["7:cpuset,memory:/job", "0::/job"], first, second)
    tree.group("sys/fs/cgroup/memory/job", 60 * MIB, 20 * MIB, names=V1)
    (tmp_path / "sys/fs/cgroup/unified/job").mkdir(parents=True)
    assert tree.free() == 40 * MIB


def test_no_limit_returns_none(tmp_path):
    first = "/ /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    tree = Tree(tmp_path, ["7:memory:/job", "0::/"], first, UNIFIED)
    tree.group("sys/fs/cgroup/memory/job", 9223372036854771712, 20 * MIB, names=V1)
    tree.group("sys/fs/cgroup", "max", 20 * MIB)
    assert tree.free() is None
    assert cgroups.free_bytes(tmp_path / "nothing") is None


def test_a_group_over_its_limit_has_nothing_free(tmp_path):
    tree = Tree(tmp_path, ["0::/"], UNIFIED)
    tree.group("sys/fs/cgroup", 10 * MIB, 11 * MIB)
    assert tree.free() == 0


def test_a_path_outside_the_mount_means_the_mount_root(tmp_path):
    tree = Tree(tmp_path, ["0::/../../elsewhere"], UNIFIED)
    tree.group("sys/fs/cgroup", 10 * MIB, 4 * MIB)
    assert tree.free() == 6 * MIB


def memory_group():
    """A folder in which groups with memory accounting can be created, and the names of their files."""
    for kind, top, mounted in cgroups._mounts(Path("/")):
        names = V1 if kind == "cgroup" else V2
        enabled = Path(mounted, "cgroup.subtree_control")
        if top == "/" and (kind == "cgroup" or (enabled.exists() and "memory" in enabled.read_text().split())):
            return Path(mounted), names
    return None, V2


@contextlib.contextmanager
def container(nbytes):
    """Create a group with a limit of ``nbytes``; yields the command that starts Python in it."""
    folder, names = memory_group()
    group = folder / f"weightsync-test-{os.getpid()}" if folder is not None else None
    try:
        if group is None:
            raise PermissionError("no hierarchy that accounts for memory can be written here")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a control group, run the tests as root: {error}")
    try:
        (group / names[0]).write_text(str(nbytes))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', sys.executable)
    finally:
        group.rmdir()


def test_a_real_kernel_limit_is_read():
    code = "from weightsync.memory import cgroups; print(cgroups.free_bytes())"
    with container(300 * MIB) as start:
        said = subprocess.run([*start, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert 0 < int(said.stdout) <= 300 * MIB


def test_free_memory_never_exceeds_the_containers(monkeypatch):
    before = arenas.free_bytes(CPU)
    monkeypatch.setattr(cgroups, "free_bytes", lambda: 5 * MIB)
    assert arenas.free_bytes(CPU) == 5 * MIB
    assert arenas.free_shared_bytes() <= 5 * MIB
    monkeypatch.setattr(cgroups, "free_bytes", lambda: 1 << 62)
    assert abs(arenas.free_bytes(CPU) - psutil.virtual_memory().available) < 1 << 30 < before


def test_an_engine_whose_container_cannot_hold_the_model_is_refused_before_the_transfer(model_folder, trained):
    """The rank's stage does not fit: refused by name with staging "full", streamed with "auto"."""
    size = sum(tensor.nbytes for tensor in trained.state_dict().values())
    half = f"cgroups.free_bytes = lambda: {size // 2}"
    code = f"from weightsync import testing\nfrom weightsync.memory import cgroups\n{half}\ntesting.main()\n"
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code)) as engine:
        served = Sender([engine.url])
        before = served.status(digest=True)[engine.url].ranks[0].digest
        refusal = rf'rank 0: the stage takes [0-9]+ bytes, but {size // 2} are free on cpu; pass staging="none"'
        with Sender([engine.url], bucket_bytes=64 << 10) as sender, pytest.raises(TransferFailed, match=refusal):
            sender.push(trained)
        assert served.status(digest=True)[engine.url].ranks[0].digest == before
        with Sender([engine.url], bucket_bytes=64 << 10, staging="auto") as sender:
            assert sender.push(trained).staging == "none"
        served.close()
