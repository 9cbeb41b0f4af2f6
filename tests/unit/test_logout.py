"""Engine and trainer of one user find each other however they were started, and continue when the user logs out."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from weightsync import Sender
from weightsync.errors import AuthenticationFailed
from weightsync.memory import arenas
from weightsync.protocol import auth, directories
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine


def environment(**changes):
    """The environment of this process without a key and a session, plus ``changes``."""
    left_out = ("WEIGHTSYNC_TOKEN", "XDG_RUNTIME_DIR")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **changes}


def served_digest(sender, engine):
    return sender.status(digest=True)[engine.url].ranks[0].digest


@pytest.mark.parametrize("session", ["engine", "trainer"])
def test_engine_and_trainer_agree_on_the_key_if_only_one_has_a_login_session(
    model_folder, trained, tmp_path, monkeypatch, session
):
    """The other one was started by cron, slurm, sudo or docker exec, and has no ``XDG_RUNTIME_DIR``."""
    monkeypatch.delenv("WEIGHTSYNC_TOKEN")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if session == "trainer":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    env = environment(XDG_RUNTIME_DIR=str(tmp_path)) if session == "engine" else environment()
    with ReferenceEngine(model_folder("llama", 0), env=env) as engine, Sender([engine.url]) as sender:
        sender.push(trained)
        assert served_digest(sender, engine) == digest_of(trained.state_dict().items())


def test_a_key_mismatch_is_reported_with_the_origin_of_each_key(model_folder, own_homes, tmp_path):
    log = tmp_path / "log"
    launcher = ("sh", "-c", f'exec "$0" -m weightsync.testing "$@" 2>{log}', sys.executable)
    env = environment(WEIGHTSYNC_TOKEN="the engine's own")
    with ReferenceEngine(model_folder("llama", 0), launcher=launcher, env=env) as engine:
        missing = " or ".join(re.escape(str(home / "token")) for home in own_homes)
        with pytest.raises(
            AuthenticationFailed, match=f"this side's is missing .WEIGHTSYNC_TOKEN is not set.*{missing}"
        ):
            Sender([engine.url])
        auth.engine_token()  # another engine's
        with pytest.raises(
            AuthenticationFailed, match=f"this side's is the one in {own_homes[0]}/token, and the engine's log"
        ):
            Sender([engine.url])
        assert "weightsync requires the key in WEIGHTSYNC_TOKEN" in log.read_text()


def log_out(pid):
    """Remove what a login manager removes when a user's last session ends: shared memory."""
    for place in (arenas.SHM_DIRECTORY, directories.directory()):
        for path in place.glob(f"weightsync-{pid}-*"):
            (shutil.rmtree if path.is_dir() else os.unlink)(path)


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_trainer_continues_after_its_user_has_logged_out(engine, model_folder, trained, keep_previous):
    with Sender([engine.url], keep_previous=keep_previous) as sender:
        sender.push(trained)
        log_out(os.getpid())
        for seed in (0, 1, 0):
            sender.push(model_folder("llama", seed))
        log_out(os.getpid())
        with ReferenceEngine(model_folder("llama", 1)) as late:
            assert sender.add_engine(late.url) is None  # the arena with the version cannot be opened any more
            sender.push(trained)
            assert served_digest(sender, late) == digest_of(trained.state_dict().items())


def test_a_trainer_under_nohup_outlives_the_session_that_started_it(engine, model_folder, tmp_path):
    """The session's runtime directory is removed and cannot be created again."""
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    code = (
        "import sys; from weightsync import Sender\n"
        f"with Sender([{engine.url!r}]) as sender:\n"
        "    for folder in sys.argv[1:]:\n"
        "        print(sender.push(folder).version, flush=True); sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, *(str(model_folder("llama", seed)) for seed in (0, 1, 0))]
    env = environment(XDG_RUNTIME_DIR=str(session), WEIGHTSYNC_TOKEN=os.environ["WEIGHTSYNC_TOKEN"])
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        first = int(trainer.stdout.readline())
        shutil.rmtree(session)
        session.touch()  # prevents a new directory of that name
        log_out(trainer.pid)
        said, _ = trainer.communicate("\n\n\n", timeout=120)
    assert [first, *map(int, said.split())] == [first, first + 1, first + 2]
    assert trainer.returncode == 0
