"""A trainer that was killed counts as dead at once, whatever its children still hold."""

import os
import signal
import socket
import subprocess
import sys
import warnings

import pytest

from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.memory import arenas, forks
from weightsync.protocol import addresses, directories
from weightsync.tensors.layout import digest_of
from weightsync.transports.control.trainer import TrainerControl

#: Pushes, forks an idle child, as a data loader's worker is, prints its process id, and waits to be killed.
TRAINER = """
import os, signal, sys
from weightsync import Sender
url, folder, transport = sys.argv[1:]
sender = Sender([url], transport=transport)
sender.push(folder)
child = os.fork()
if not child:
    os.close(1)
    signal.pause()
print(child, flush=True)
signal.pause()
"""


@pytest.fixture
def children():
    """A list of process ids to be killed at the end."""
    found = []
    yield found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def forked():
    """Fork an idle child of this process."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of forks beside threads
        child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("transport", ["ipc_zmq", "nixl", "nccl"])
def test_a_killed_trainer_is_replaced_at_once_although_its_child_lives(
    engine, model_folder, trained, children, transport
):
    command = [sys.executable, "-c", TRAINER, engine.url, str(model_folder("llama", 0)), transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        children.append(int(trainer.stdout.readline()))
        trainer.kill()
    os.kill(children[0], 0)  # the child is alive
    # The lease has not lapsed by time: that takes ten minutes without a push.
    with Sender([engine.url], timeout_s=60) as sender:
        assert sender.status()[engine.url].holder == ""
        sender.push(trained)
        assert sender.status(digest=True)[engine.url].ranks[0].digest == digest_of(trained.state_dict().items())
        arenas.sweep(older_than_s=0.0)
        directories.sweep(older_than_s=0.0)
        for place in (arenas.SHM_DIRECTORY, directories.directory()):
            assert not list(place.glob(f"weightsync-{trainer.pid}-*"))


@pytest.mark.parametrize("remote", [False, True])
def test_a_listening_socket_is_not_inherited_by_children(children, remote):
    control = TrainerControl(remote=remote)
    try:
        address = control.address("http://127.0.0.1:1")
        children.append(forked())
        assert addresses.owner_lives(address)
        (descriptor,) = control._listening
        assert "socket" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert not os.get_inheritable(descriptor)  # programs that are started do not inherit it either
        # The child closes its copy before `fork` returns there, but this process may be faster.
        deadline = Deadline(30)
        while os.path.lexists(f"/proc/{children[0]}/fd/{descriptor}"):
            deadline.check("the child to close its copy")
    finally:
        control.close()
    assert not addresses.owner_lives(address)


def test_a_disowned_descriptor_is_inherited_by_later_children():
    with socket.socket() as one:
        number = forks.own(one.fileno)
        forks.disown(number)
        child = os.fork()
        if not child:
            os._exit(0 if os.path.lexists(f"/proc/self/fd/{number}") else 1)
        assert os.waitpid(child, 0)[1] == 0
