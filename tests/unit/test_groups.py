"""The checks before a process group is created, so that nobody hangs in one."""

import socket
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.manual import CPU
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.domains import layout_of
from weightsync.tensors.layout import ALIGN_BYTES, Layout
from weightsync.transports import registry
from weightsync.transports.nccl import groups, parallel_broadcast
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl.messages import RegisterNixl

#: A group of the trainer, an engine with two ranks, and an engine with one.
ASKED = InitNcclGroup(
    group_name="g",
    master_address="127.0.0.1",
    master_port=1,
    rank_offset=1,
    world_size=4,
    backend="gloo",
    timeout_s=5.0,
    members=(("http://a", 2), ("http://b", 1)),
)


def asked(**changes):
    return msgspec.structs.replace(ASKED, **changes)


# --- the size of the world --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "ranks"), [(1, 2), (3, 1)])
def test_consistent_group_sizes_are_accepted(offset, ranks):
    groups.check_world(asked(rank_offset=offset), ranks)
    groups.check_world(asked(rank_offset=offset, members=()), ranks)


def test_a_trainer_may_take_the_first_ranks_of_the_group():
    groups.check_world(asked(rank_offset=2, world_size=5), 2)
    groups.check_world(asked(rank_offset=4, world_size=5), 1)


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"members": (), "world_size": 2}, 2, "world_size 2 is too small: this engine's 2 ranks are 1 to 2, after 1"),
        ({"members": (), "rank_offset": 3}, 2, "world_size 4 is too small: this engine's 2 ranks are 3 to 4, after 3"),
        ({"world_size": 3}, 2, "world_size 3 is wrong: members lists 3 engine ranks.* at least 4"),
        (
            {"world_size": 5},
            2,
            "rank_offset 1 is wrong: this engine has 2 ranks, and members of the group of 5 lists 0 ranks",
        ),
        (
            {"rank_offset": 2},
            2,
            "rank_offset 2 is wrong: this engine has 2 ranks, and members of the group of 4 lists 0 ranks",
        ),
        ({}, 1, "rank_offset 1 is wrong: this engine has 1 ranks, and members of the group of 4 lists 2 ranks"),
        ({"rank_offset": 3}, 2, "world_size 4 is too small"),
    ],
)
def test_inconsistent_group_sizes_are_refused_by_name(changes, ranks, said):
    with pytest.raises(UnsupportedOption, match=said):
        groups.check_world(asked(**changes), ranks)


# --- which rank of a trainer sends what ------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 9))
def test_every_bucket_is_broadcast_by_one_sender(senders, size, bucket):
    layout, bucket_bytes = Layout([TensorSpec("t", "uint8", (size * ALIGN_BYTES,))]), bucket * ALIGN_BYTES
    by_sender = [parallel_broadcast.places(layout, bucket_bytes, sender, senders) for sender in range(senders)]
    places = [place for own in by_sender for place in own]
    assert sorted(place.number for place in places) == list(range(-(-layout.nbytes // bucket_bytes)))
    for number, start, end in places:
        assert start == number * bucket_bytes
        assert end == min(start + bucket_bytes, layout.nbytes)
    for sender, own in enumerate(by_sender):
        assert [place.number for place in own] == sorted(place.number for place in own)
        assert all(place.number % senders == sender for place in own)


def test_of_several_hosts_each_broadcasts_its_part_of_every_bucket():
    rows = [(0, ((0, 0), (2, 1024))), (0, ((2, 0), (1, 1024))), (0, ((3, 0), (1, 1024)))]
    layout = layout_of([TensorSpec("t", "uint8", (4, 1024))], ((rows[0],), (rows[2],), (), (rows[1],)))
    by_sender = [parallel_broadcast.places(layout, 1536, sender, 4) for sender in range(4)]
    assert by_sender == [((0, 0, 1536), (1, 1536, 2048)), ((2, 0, 1024),), (), ((1, 0, 1024),)]


# --- settings with which NCCL would hang or crash ---------------------------------------------------------------------


def rank(uuid="GPU-1", **settings):
    return http.RankInfo(rank=0, pid=0, device="cuda", device_uuid=uuid, settings=settings)


def preflight(*ranks, ours=(), uuid="GPU-0"):
    groups.preflight(dict(ours), uuid, [(f"rank {n} of http://a", rank) for n, rank in enumerate(ranks)])


def test_ranks_that_differ_only_in_their_gpus_are_accepted():
    same = {"NCCL": "2.27.5", "NCCL_ALGO": "Ring"}
    preflight(rank("GPU-1", **same), rank("GPU-2", **same), ours=same)


def test_two_ranks_on_one_gpu_are_named():
    with pytest.raises(UnsupportedOption, match="rank 1 of http://a and rank 0 of http://a share the GPU GPU-1"):
        preflight(rank("GPU-1"), rank("GPU-1"))


def test_a_rank_on_the_trainers_gpu_is_named():
    with pytest.raises(
        UnsupportedOption, match=r"rank 0 of http://a and the trainer share the GPU GPU-0.*takes shared memory"
    ):
        preflight(rank("GPU-0"))


def test_a_gpu_may_be_shared_if_both_sides_allow_it():
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    preflight(rank("GPU-0", **shared), rank("GPU-0", **shared), ours=shared)
    with pytest.raises(UnsupportedOption, match="NCCL_MULTI_RANK_GPU_ENABLE is not set at rank 0 of http://a and 1 at"):
        preflight(rank("GPU-0"), ours=shared)


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_CUMEM_ENABLE": "0"}


def test_expandable_segments_without_cumem_are_refused_on_either_side():
    with pytest.raises(
        UnsupportedOption, match=r"^rank 0 of http://a runs with expandable_segments and NCCL_CUMEM_ENA"
    ):
        preflight(rank(**EXPANDABLE), ours={"NCCL_CUMEM_ENABLE": "0"})
    with pytest.raises(UnsupportedOption, match=r"^the trainer runs with expandable_segments and NCCL_CUMEM_ENABLE=0"):
        preflight(rank(NCCL_CUMEM_ENABLE="0"), ours=EXPANDABLE)


def test_either_of_the_two_settings_alone_is_accepted():
    preflight(rank(NCCL_CUMEM_ENABLE="0"), ours={"NCCL_CUMEM_ENABLE": "0"})
    preflight(rank(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"NCCL_ALGO": "Tree"}, {"NCCL_ALGO": "Ring"}, "NCCL_ALGO is Tree at rank 0 of http://a and Ring at the trai"),
        ({"NCCL_ALGO": "Tree"}, {}, "NCCL_ALGO is Tree at rank 0 of http://a and not set at the trainer"),
        ({}, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is not set at rank 0 of http://a and 1 at the trainer"),
        ({"NCCL": "2.27.5"}, {"NCCL": "2.21.5"}, r"NCCL is 2\.27\.5 at rank 0 of http://a and 2\.21\.5 at the trainer"),
    ],
)
def test_settings_that_differ_are_named_with_both_values(theirs, ours, said):
    with pytest.raises(UnsupportedOption, match=said):
        preflight(rank(**theirs), ours=ours)


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_IB_HCA", "NCCL_HOSTID"])
def test_host_specific_settings_may_differ(name):
    preflight(rank(**{name: "theirs"}), ours={name: "ours"})
    preflight(rank(**{name: "theirs"}))


def test_a_process_reports_its_nccl_settings_and_no_others(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_LONG", "x" * 5000)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "secret")
    found = groups.settings()
    assert (found["NCCL_ALGO"], found["PYTORCH_CUDA_ALLOC_CONF"]) == ("Ring", "expandable_segments:True")
    assert "secret" not in str(found)
    info = http.RankInfo(rank=0, pid=0, device="cpu", settings=found)
    assert http.from_json(http.to_json(info), http.RankInfo) == info  # nothing in it is too long for the wire


# --- the route to the store -------------------------------------------------------------------------------------------


@pytest.fixture
def end():
    end = registry.spec("nccl").engine_end(CPU)
    yield end
    end.close()


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "*"])
def test_a_wildcard_address_is_refused(end, address):
    with pytest.raises(UnsupportedOption, match="cannot be dialled: give the trainer's own address"):
        end.join(asked(master_address=address), 0)


@pytest.mark.parametrize("address", ["..", "a\0b", "x" * 1000, "no such host", "255.255.255.255"])
def test_an_invalid_address_is_refused_by_name(end, address):
    with pytest.raises((UnsupportedOption, TransferFailed)) as raised:
        end.join(asked(master_address=address), 0)
    assert address in str(raised.value)


def test_an_unreachable_store_is_reported_with_the_route_that_was_tried(end):
    with pytest.raises(
        TransferFailed, match=r"rank 0 cannot reach.*127\.0\.0\.1 port 1 from lo \(127\.0\.0\.1\): .*refu"
    ):
        end.join(ASKED, 0)


def test_a_silent_store_is_abandoned_after_two_seconds(end, deaf):
    start = time.monotonic()
    with pytest.raises(TransferFailed, match=f"cannot reach the trainer's store at 127.0.0.1 port {deaf}"):
        end.join(asked(master_port=deaf, timeout_s=60.0), 0)
    assert 1.9 < time.monotonic() - start < 4


def test_a_silent_store_that_hangs_up_leaves_no_thread(end):
    def joining():
        return [thread for thread in threading.enumerate() if thread.name == "weightsync-join"]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(3):
            end.join(asked(master_port=silent.getsockname()[1], timeout_s=0.5), 0)
        end.close()
    give_up = time.monotonic() + 10
    while joining() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert joining() == []


def test_a_rank_without_a_gpu_cannot_join_an_nccl_group(end):
    with pytest.raises(UnsupportedOption, match="rank 0 is on cpu, where there is no NCCL: use gloo"):
        end.join(asked(backend="nccl"), 0)


def test_an_engine_end_refuses_another_transports_handshake(end):
    register = RegisterNixl(agent="a", metadata=b"", timeout_s=5.0)
    for name, other in (("nccl", register), ("nixl", ASKED), ("ipc_zmq", ASKED), ("ipc_zmq", register)):
        made = end if name == "nccl" else registry.spec(name).engine_end(CPU)
        with pytest.raises(UnsupportedOption, match=f"{name} takes .*, but was sent {type(other).__name__}"):
            made.join(other, 0)
        made.close()
