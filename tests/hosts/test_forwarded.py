"""An engine behind a port that is forwarded to another host, as by docker -p, kubectl port-forward or ssh -L."""

import sys
from typing import NamedTuple

import pytest

from tests.hosts.programs import PORT, served
from tools.servers import free_port

#: Listens on the loopback and forwards to another host.
FORWARD = """
import asyncio, sys

async def pipe(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(here, host, there):
    async def forward(reader, writer):
        onward = await asyncio.open_connection(host, int(there))
        await asyncio.gather(pipe(reader, onward[1]), pipe(onward[0], writer), return_exceptions=True)

    server = await asyncio.start_server(forward, "127.0.0.1", int(here))
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main(*sys.argv[1:]))
"""


class Forwarded(NamedTuple):
    """An engine at its URL on the trainer's host."""

    url: str


@pytest.fixture
def forwarded(network, far):
    here, command = free_port(), (sys.executable, "-c", FORWARD)
    there = (str(here), network.hosts["a"].address, str(PORT))
    process = network.hosts["trainer"].popen(*command, *there, stdout=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    yield Forwarded(f"http://127.0.0.1:{here}")
    process.kill()
    process.communicate()


def test_a_forwarded_engine_is_refused_before_it_is_asked_for_anything(
    trainer, far, forwarded, model_folder, transport
):
    before = far[0].status()
    said = trainer.push([forwarded], model_folder("llama", 1), transport=transport, timeout_s=10.0)
    assert said["error"] == "UnsupportedOption", said
    assert f"{forwarded.url} is reached from 127.0.0.1" in said["message"]
    assert "docker -p" in said["message"]
    assert 'pass Sender(..., address="' in said["message"]
    assert far[0].status() == before


def test_a_forwarded_engine_is_reached_if_the_trainers_address_is_given(
    trainer,
    network,
    far,
    forwarded,
    model_folder,
    digest,
    transport,
):
    address = network.hosts["trainer"].address
    for seed in (1, 2):
        said = trainer.push([forwarded], model_folder("llama", seed), transport=transport, address=address)
        assert not said["error"], said
        assert served(far[0]) == digest(seed)


def test_an_address_of_another_host_is_refused(trainer, network, far, model_folder):
    said = trainer.push(far, model_folder("llama", 1), address=network.hosts["b"].address)
    assert said["error"] == "UnsupportedOption"
    assert "is not an address of this host" in said["message"]
    assert network.hosts["trainer"].address in said["message"]
