"""The key file, the private directory, and what is never dialled or mapped."""

import os
import stat
import threading

import pytest

from weightsync import security, staging
from weightsync.errors import AuthenticationFailed, TransferFailed
from weightsync.handles import ShmHandle


@pytest.fixture(autouse=True)
def own_runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("WEIGHTSYNC_TOKEN", raising=False)
    return tmp_path


def test_engine_and_sender_of_one_user_find_the_same_key(own_runtime):
    assert security.sender_token() == ""
    token = security.engine_token()
    assert len(token) >= 32
    assert security.engine_token() == security.sender_token() == token
    file = own_runtime / "weightsync" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert os.listdir(file.parent) == ["token"]


def test_engines_that_start_together_agree_on_the_key():
    found, start = [], threading.Barrier(8)

    def engine():
        start.wait(10)
        found.append(security.engine_token())

    threads = [threading.Thread(target=engine) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_the_variable_comes_first(monkeypatch):
    security.engine_token()
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "mine")
    assert security.engine_token() == security.sender_token() == "mine"


def test_a_key_file_that_others_can_read_is_refused(own_runtime):
    security.engine_token()
    (own_runtime / "weightsync" / "token").chmod(0o644)
    with pytest.raises(AuthenticationFailed, match="0600"):
        security.sender_token()


def test_a_runtime_directory_that_others_can_enter_is_refused(own_runtime):
    (own_runtime / "weightsync").mkdir(mode=0o755)
    with pytest.raises(AuthenticationFailed, match="0755"):
        security.engine_token()


def test_a_linked_runtime_directory_is_refused(own_runtime, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    (own_runtime / "weightsync").symlink_to(elsewhere)
    with pytest.raises(AuthenticationFailed, match="not a directory"):
        security.engine_token()


def test_a_linked_key_file_is_refused(own_runtime):
    security.engine_token()
    file = own_runtime / "weightsync" / "token"
    file.rename(own_runtime / "real")
    file.symlink_to(own_runtime / "real")
    with pytest.raises(AuthenticationFailed, match="symbolic"):
        security.sender_token()


def test_keys_compare_whole_and_empty_never_matches():
    assert security.same("abc", "abc")
    assert not security.same("ab", "abc")
    assert not security.same("", "")
    assert not security.same("schlüssel", "abc")


def test_a_senders_address_passes():
    directory = security.private_directory()
    assert security.check_ipc_address(f"ipc://{directory}/control")


def test_addresses_that_are_not_a_senders_are_not_dialled(own_runtime):
    open_directory = own_runtime / "weightsync-open"
    open_directory.mkdir(mode=0o755)
    link = own_runtime / "weightsync-link"
    link.symlink_to(security.private_directory())
    for address in (
        "tcp://127.0.0.1:5555",
        "ipc://@abstract",
        "ipc:///etc/passwd",
        f"ipc://{own_runtime}/weightsync-absent/control",
        f"ipc://{open_directory}/control",
        f"ipc://{link}/control",
        f"ipc://{security.private_directory()}/other",
        "",
    ):
        with pytest.raises(TransferFailed, match="refused to dial"):
            security.check_ipc_address(address)


def test_an_arena_is_private_shared_and_removed():
    arena = staging.ShmArena(1 << 16)
    path = staging.SHM_DIRECTORY / arena.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    mapped = staging.attach(arena.handle())
    arena.bytes.fill_(7)
    assert (mapped == 7).all()
    arena.close()
    assert not path.exists()
    arena.close()


def test_a_forgotten_arena_is_removed():
    arena = staging.ShmArena(1 << 16)
    path = staging.SHM_DIRECTORY / arena.name
    del arena
    assert not path.exists()


def test_a_full_mount_is_an_error_that_says_so():
    mount = os.statvfs(staging.SHM_DIRECTORY)
    with pytest.raises(TransferFailed, match="shared memory could not be had"):
        staging.ShmArena(mount.f_blocks * mount.f_frsize + (1 << 30))


def test_files_that_are_not_a_senders_arena_are_not_mapped(tmp_path):
    arena = staging.ShmArena(1 << 16)
    path = staging.SHM_DIRECTORY / arena.name
    link = staging.SHM_DIRECTORY / f"{arena.name}-link"
    link.symlink_to(path)
    try:
        handles = [
            ShmHandle(path="/etc/passwd", nbytes=10),
            ShmHandle(path=str(staging.SHM_DIRECTORY / "other"), nbytes=10),
            ShmHandle(path=str(link), nbytes=1 << 16),
            ShmHandle(path=str(path), nbytes=1 << 20),
            ShmHandle(path=f"{staging.SHM_DIRECTORY}/../etc/passwd", nbytes=10),
        ]
        for handle in handles:
            with pytest.raises(TransferFailed):
                staging.attach(handle)
        path.chmod(0o644)
        with pytest.raises(TransferFailed, match="not this user's alone"):
            staging.attach(arena.handle())
    finally:
        link.unlink()
        arena.close()
