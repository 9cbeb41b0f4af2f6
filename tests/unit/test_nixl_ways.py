"""Who moves the bytes over NIXL: a rank reads them, or they are written to it."""

import pytest
import torch

from tests.unit.manual import hello_of
from weightsync.memory import arenas
from weightsync.transports.nixl.link import is_written
from weightsync.transports.nixl.messages import SendingAgent
from weightsync.transports.nixl.trainer import NixlTrainerEnd

HERE = arenas.host_id()


@pytest.mark.parametrize(
    ("host", "nic", "rdma", "several", "written"),
    [
        (HERE, "mlx5_0:1", True, True, False),  # through memory of their host
        ("another", "mlx5_0:1", True, False, False),
        ("another", "mlx5_0:1", True, True, True),  # so that ranks can pass it on
        ("another", "", True, False, True),  # over TCP
        ("another", "mlx5_0:1", False, False, True),
        ("", "", False, True, False),  # an earlier release does not write
    ],
)
def test_what_is_written_to_a_rank(host, nic, rdma, several, written):
    assert is_written(nic, SendingAgent("agent", b"", host, rdma), several) is written


@pytest.mark.parametrize(
    ("hosts", "several"),
    [(["a"], False), (["a", "a"], False), (["a", "b"], True), ([HERE, "a"], False), ([HERE, "a", "b"], True)],
)
def test_a_sender_tells_engines_whether_ranks_on_several_hosts_get_the_same(hosts, several):
    end = NixlTrainerEnd(torch.device("cpu"))
    try:
        hellos = {f"http://127.0.0.1:{port}": hello_of(host=host) for port, host in enumerate(hosts, 1)}
        asked = end.connect(hellos, 5.0)
        assert {one.several for one in asked.values()} == {several}
    finally:
        end.close()
