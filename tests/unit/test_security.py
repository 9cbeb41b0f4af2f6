"""The key file, the private directory, and addresses and files that are never dialled or mapped."""

import errno
import os
import shutil
import socket
import stat
import tempfile
import threading

import pytest

from weightsync.errors import AuthenticationFailed, TransferFailed
from weightsync.memory import arenas
from weightsync.protocol import addresses, auth, directories
from weightsync.protocol.handles import ShmHandle


@pytest.fixture(autouse=True)
def homes(own_homes):
    return own_homes


def token_of(home):
    return (home / "token").read_text()


def test_engine_and_sender_of_one_user_find_the_same_key(homes):
    assert auth.sender_token() == ""
    token = auth.engine_token()
    assert len(token) >= 32
    assert auth.engine_token() == auth.sender_token() == token
    for home in homes:
        assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert os.listdir(home) == ["token"]


@pytest.mark.parametrize("sets", ["engine", "sender"])
def test_they_find_the_same_key_if_only_one_has_a_runtime_directory(homes, monkeypatch, sets):
    base = os.environ["XDG_RUNTIME_DIR"]
    for side, read in (("engine", auth.engine_token), ("sender", auth.sender_token)):
        if side == sets:
            monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        else:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
            monkeypatch.setattr(tempfile, "tempdir", f"{base}-elsewhere")
        token = read()
        assert token == token_of(homes[0])


def test_a_key_written_by_an_older_engine_is_kept(homes):
    homes[1].mkdir(mode=0o700, parents=True)
    (homes[1] / "token").touch(mode=0o600)
    (homes[1] / "token").write_text("from before")
    assert auth.sender_token() == "from before"
    assert auth.engine_token() == "from before"
    assert [token_of(home) for home in homes] == ["from before"] * 3


def test_the_key_survives_a_logout_that_removes_runtime_directory_and_shared_memory(homes):
    token = auth.engine_token()
    for home in homes[:2]:
        shutil.rmtree(home)
    assert auth.sender_token() == auth.engine_token() == token


def test_engines_that_start_together_agree_on_the_key():
    found, start = [], threading.Barrier(8)

    def engine():
        start.wait(10)
        found.append(auth.engine_token())

    threads = [threading.Thread(target=engine) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_the_environment_variable_takes_precedence(monkeypatch):
    auth.engine_token()
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "mine")
    assert auth.engine_token() == auth.sender_token() == "mine"


def test_an_engine_logs_at_start_which_key_it_asks_for(homes, caplog, monkeypatch):
    token = auth.engine_token()
    assert caplog.messages == [f"weightsync requires the key in {homes[0] / 'token'}"]
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "mine")
    auth.engine_token()
    assert caplog.messages[1:] == ["weightsync requires the key in WEIGHTSYNC_TOKEN"]
    assert token not in caplog.text


def test_a_sender_reports_the_origin_of_its_key(homes, monkeypatch):
    none = auth.origin("")
    assert all(str(home / "token") in none for home in homes)
    auth.engine_token()
    assert auth.origin(auth.sender_token()) == f"the one in {homes[0] / 'token'}"
    assert auth.origin("given") == "the one that the sender was given"
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "mine")
    assert auth.origin(auth.sender_token()) == "the one in WEIGHTSYNC_TOKEN"


def test_a_key_file_that_others_can_read_is_refused(homes):
    auth.engine_token()
    (homes[0] / "token").chmod(0o644)
    with pytest.raises(AuthenticationFailed, match="0600"):
        auth.sender_token()


def test_a_directory_that_others_can_enter_is_not_used_for_the_key(homes):
    for home in homes:
        home.mkdir(mode=0o755, parents=True)
    with pytest.raises(AuthenticationFailed, match=r"WEIGHTSYNC_TOKEN.*(0755.*){3}"):
        auth.engine_token()
    with pytest.raises(AuthenticationFailed, match="0755"):
        directories.private_directory()


def test_an_untrusted_directory_is_skipped_and_named(homes, caplog):
    homes[0].mkdir(mode=0o777)
    token = auth.engine_token()
    assert token == auth.sender_token() == token_of(homes[1]) == token_of(homes[2])
    assert os.listdir(homes[0]) == []
    assert f"{homes[0]} cannot be trusted" in caplog.text


def test_a_linked_directory_is_refused(homes, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    homes[0].symlink_to(elsewhere)
    with pytest.raises(AuthenticationFailed, match="not a directory"):
        directories.directory()
    auth.engine_token()
    assert os.listdir(elsewhere) == []


def test_a_linked_key_file_is_refused(homes):
    auth.engine_token()
    file = homes[0] / "token"
    file.rename(homes[0] / "real")
    file.symlink_to(homes[0] / "real")
    with pytest.raises(AuthenticationFailed, match="symbolic"):
        auth.sender_token()


def test_a_full_mount_is_reported_and_leaves_no_partial_key(homes, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(AuthenticationFailed, match=f"{homes[0]}/token cannot be written: No space left"):
        auth.engine_token()
    assert os.listdir(homes[0]) == []


def test_sweeping_removes_what_a_dead_sender_left_and_nothing_else(homes):
    root = directories.directory()
    dead = directories.private_directory()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead / "control"))
    for name in ("label", "label.1"):  # of an engine with several servers, which was killed while it wrote
        (dead / name).touch()
    mine = root / "weightsync-1-0123456789abcdef"  # named like a sender's directory, with a foreign file
    kept = [root / "weightsync-checkpoints", root / "weightsync-12-ab", mine]
    for folder in kept:
        folder.mkdir(mode=0o700)
        (folder / "step-1000.safetensors").write_text("precious")
    outside = root.parent / "weightsync-mine"
    outside.mkdir(mode=0o700)
    alive = directories.private_directory()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(alive / "control"))
        living.listen()
        directories.sweep(older_than_s=0.0)
        assert (alive / "control").exists()
    assert not dead.exists()
    assert all((folder / "step-1000.safetensors").read_text() == "precious" for folder in kept)
    assert outside.exists()


def test_sweeping_spares_files_that_are_not_named_like_an_arena():
    notes = arenas.SHM_DIRECTORY / f"weightsync-notes-of-{os.getpid()}"
    notes.touch(mode=0o600)
    try:
        arenas.sweep(older_than_s=0.0)
        assert notes.exists()
    finally:
        notes.unlink()


def test_keys_are_compared_in_full_and_an_empty_key_never_matches():
    assert auth.same("abc", "abc")
    assert not auth.same("ab", "abc")
    assert not auth.same("", "")
    assert not auth.same("schlüssel", "abc")


def test_a_senders_address_is_accepted():
    directory = directories.private_directory()
    assert addresses.check_ipc_address(f"ipc://{directory}/control")


def test_addresses_that_are_not_a_senders_are_not_dialled(tmp_path):
    open_directory = tmp_path / "weightsync-open"
    open_directory.mkdir(mode=0o755)
    link = tmp_path / "weightsync-link"
    link.symlink_to(directories.private_directory())
    for address in (
        "tcp://127.0.0.1:5555",
        "ipc://@abstract",
        "ipc:///etc/passwd",
        f"ipc://{tmp_path}/weightsync-absent/control",
        f"ipc://{open_directory}/control",
        f"ipc://{link}/control",
        f"ipc://{directories.private_directory()}/other",
        "",
    ):
        with pytest.raises(TransferFailed, match="refused to dial"):
            addresses.check_ipc_address(address)


def test_an_arena_is_private_shared_and_removed():
    arena = arenas.ShmArena(1 << 16)
    path = arenas.SHM_DIRECTORY / arena.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    mapped = arenas.attach(arena.handle())
    arena.bytes.fill_(7)
    assert (mapped == 7).all()
    arena.close()
    assert not path.exists()
    arena.close()


def test_an_arena_that_was_never_closed_is_removed():
    arena = arenas.ShmArena(1 << 16)
    path = arenas.SHM_DIRECTORY / arena.name
    del arena
    assert not path.exists()


def test_a_full_mount_is_reported():
    mount = os.statvfs(arenas.SHM_DIRECTORY)
    with pytest.raises(TransferFailed, match="shared memory could not be allocated"):
        arenas.ShmArena(mount.f_blocks * mount.f_frsize + (1 << 30))


def test_files_that_are_not_a_senders_arena_are_not_mapped(tmp_path):
    arena = arenas.ShmArena(1 << 16)
    path = arenas.SHM_DIRECTORY / arena.name
    link = arenas.SHM_DIRECTORY / f"{arena.name}-link"
    link.symlink_to(path)
    try:
        handles = [
            ShmHandle(path="/etc/passwd", nbytes=10),
            ShmHandle(path=str(arenas.SHM_DIRECTORY / "other"), nbytes=10),
            ShmHandle(path=str(link), nbytes=1 << 16),
            ShmHandle(path=str(path), nbytes=1 << 20),
            ShmHandle(path=f"{arenas.SHM_DIRECTORY}/../etc/passwd", nbytes=10),
        ]
        for handle in handles:
            with pytest.raises(TransferFailed):
                arenas.attach(handle)
        path.chmod(0o644)
        with pytest.raises(TransferFailed, match="not private to this user"):
            arenas.attach(arena.handle())
    finally:
        link.unlink()
        arena.close()
