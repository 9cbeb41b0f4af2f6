"""Versions in an object store, a server that speaks S3: ``python -m tests.frameworks.store FOLDER URL``.

Writes versions of the weights in FOLDER, has the engine at URL follow them, and prints what came of it as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

from weightsync import Sender
from weightsync.cli import main as command
from weightsync.errors import TransferFailed
from weightsync.files import Folder
from weightsync.files.places import open_place
from weightsync.tensors.layout import digest_of

WHERE = "s3://policies/run"


def show(**what):
    """Print a line of JSON."""
    print(json.dumps(what), flush=True)


def version(state, number):
    """The weights of a version: each differs from the one before in some elements."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.view(-1)[number :: 50 + number] *= 1.5
    return state


def serves(url, state):
    """Whether the engine holds these weights."""
    with Sender([url]) as sender:
        (rank,) = sender.status(digest=True)[url].ranks
    return rank.digest == digest_of(state.items())


def written(name, folder, url, state):
    """Write a version, follow, and show what was written and whether the engine serves it."""
    done = folder.write(state)
    code = command(["follow", WHERE, url, "--once"])
    show(what=name, full=done.full, code=code, serves=serves(url, state))


def interrupted(folder, state):
    """Kill a writer, a process of its own, in the middle of a version, of which the store has some parts by then."""
    reached, reaches = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)

        def some():
            yield "large", torch.zeros(160 << 20, dtype=torch.uint8)
            yield from state.items()
            os.write(reaches, b"!")
            signal.pause()

        Folder(WHERE).write(some())
    os.close(reaches)
    assert os.read(reached, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main():
    folder, url = Path(sys.argv[1]), sys.argv[2]
    state = load_file(folder / "model.safetensors")
    os.environ |= {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    store = Folder(WHERE, full_every=4)
    for number in range(1, 7):
        written(f"version {number}", store, url, version(state, number))
    place = open_place(WHERE)
    show(what="files", there=sorted(name for name in place.names() if name.endswith(".json")))

    store.write(version(state, 7))
    (data,) = (name for name in place.names() if name.startswith("000000000007-"))
    with place.open(data) as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    place.publish(data, "", bytes(content))
    code = command(["follow", WHERE, url, "--once"])
    show(what="damaged", code=code, serves=serves(url, version(state, 6)))

    before = place.names()
    interrupted(store, version(state, 8))
    show(what="killed", left=sorted({*place.names()} - {*before}))
    written("after that", Folder(WHERE), url, version(state, 8))

    server.stop()
    code = command(["follow", WHERE, url, "--once"])
    try:
        store.write(version(state, 9))
    except Exception as error:
        show(what="gone", code=code, error=str(error), transfer_failed=isinstance(error, TransferFailed))


if __name__ == "__main__":
    main()
