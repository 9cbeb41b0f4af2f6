"""The transport that is chosen for an engine, and the reason."""

import os

import msgspec
import pytest

from tests.unit.manual import HERE, hello_of
from weightsync.errors import UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import directories, http
from weightsync.transports import registry
from weightsync.transports.nixl import agents

ALL = registry.available()
FAR = "another host"


def engine(*transports, host=FAR):
    """The open reply of an engine with one rank for each of these lists of transports."""
    ranks = [http.RankInfo(rank=n, pid=0, device="cpu", transports=names) for n, names in enumerate(transports)]
    return hello_of(*ranks, host=host)


@pytest.fixture(autouse=True)
def with_nixl(monkeypatch):
    monkeypatch.setattr(agents, "available", lambda: True)


@pytest.fixture
def without_nixl(monkeypatch):
    monkeypatch.setattr(agents, "available", lambda: False)


def test_all_registered_transports_but_that_for_ray_are_available():
    assert registry.names() == ("ipc_zmq", "nccl", "nixl", "rdt")
    assert registry.available() == ("ipc_zmq", "nccl", "nixl")


@pytest.fixture
def with_ray(tmp_path, monkeypatch):
    """Return a function that puts a package on the path: Ray with these files."""

    def put(*files):
        for file in ("__init__.py", *files):
            (tmp_path / "ray" / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "ray" / file).touch()
        monkeypatch.syspath_prepend(tmp_path)

    return put


def test_without_ray_or_with_an_older_one_rdt_is_refused_with_its_install_command(with_ray):
    for files in ((), ("experimental/gpu_object_manager.py",)):
        with pytest.raises(UnsupportedOption, match=r"the trainer has no transport rdt: pip install 'ray>=2.60'"):
            registry.pick("rdt", HERE, engine((*ALL, "rdt")))
        with_ray(*files)


def test_rdt_takes_ray_and_nixl_and_is_used_only_if_asked_for(with_ray, monkeypatch):
    with_ray("experimental/rdt/nixl_tensor_transport.py")
    assert registry.available() == ("ipc_zmq", "nccl", "nixl", "rdt")
    everything = engine(registry.names())
    assert registry.pick("rdt", HERE, everything) == ("rdt", "asked for")
    assert registry.pick("auto", HERE, everything)[0] == "nixl"
    with pytest.raises(UnsupportedOption, match=f"{HERE} has no transport rdt, only ipc_zmq, nccl, nixl"):
        registry.pick("rdt", HERE, engine(ALL))
    monkeypatch.setattr(agents, "available", lambda: False)
    with pytest.raises(UnsupportedOption, match=r"the trainer has no transport rdt: pip install 'weightsync\[nixl\]'"):
        registry.pick("rdt", HERE, everything)


def test_without_nixl_the_other_transports_are_available(without_nixl):
    assert registry.available() == ("ipc_zmq", "nccl")


def test_an_engine_on_the_same_host_is_reached_through_shared_memory():
    transport, reason = registry.pick("auto", HERE, engine(ALL, ALL, host=arenas.host_id()))
    assert transport == "ipc_zmq"
    assert "the same host" in reason


def test_an_engine_on_another_host_is_reached_by_nixl_if_both_sides_have_it():
    transport, reason = registry.pick("auto", HERE, engine(ALL, ALL))
    assert transport == "nixl"
    assert "both sides have NIXL" in reason


def test_an_engine_with_one_rank_without_nixl_is_reached_by_nccl():
    transport, reason = registry.pick("auto", HERE, engine(ALL, ("ipc_zmq", "nccl")))
    assert transport == "nccl"
    assert "the engine has no NIXL" in reason


def test_a_trainer_without_nixl_uses_nccl(without_nixl):
    transport, reason = registry.pick("auto", HERE, engine(ALL))
    assert transport == "nccl"
    assert "the trainer has no NIXL" in reason


@pytest.mark.parametrize("asked", ALL)
@pytest.mark.parametrize("host", [FAR, ""])
def test_a_requested_transport_is_used_if_possible(asked, host):
    hello = engine(ALL, host=host or arenas.host_id())
    if asked == "ipc_zmq" and host:
        with pytest.raises(UnsupportedOption):
            registry.pick(asked, HERE, hello)
    else:
        assert registry.pick(asked, HERE, hello) == (asked, "asked for")


def test_ipc_zmq_to_another_host_is_refused_with_advice():
    with pytest.raises(UnsupportedOption, match=f"{HERE} runs on another host.*--ipc=host.*nixl.*nccl.*auto"):
        registry.pick("ipc_zmq", HERE, engine(ALL))


def test_an_engine_over_several_hosts_takes_a_transport_that_reaches_all_its_ranks():
    ranks = [http.RankInfo(rank=0, pid=0, device="cpu", transports=ALL, host=arenas.host_id())]
    ranks += [http.RankInfo(rank=number, pid=0, device="cpu", transports=ALL, host=FAR) for number in (1, 2)]
    hello = hello_of(*ranks, host=arenas.host_id())
    transport, reason = registry.pick("auto", HERE, hello)
    assert (transport, reason) == ("nixl", "several hosts, with ranks 1, 2 on another, and both sides have NIXL")
    with pytest.raises(UnsupportedOption, match=f"{HERE} runs on several hosts, with ranks 1, 2 on another.*nccl"):
        registry.pick("ipc_zmq", HERE, hello)
    everywhere = msgspec.structs.replace(hello, ranks=tuple(ranks[1:]))
    assert registry.pick("auto", HERE, everywhere)[1].startswith("another host, and")


def test_a_transport_that_the_engine_lacks_is_refused_with_a_list_of_those_it_has():
    with pytest.raises(UnsupportedOption, match=f"{HERE} has no transport nixl, only ipc_zmq, nccl$"):
        registry.pick("nixl", HERE, engine(ALL, ("ipc_zmq", "nccl")))


def test_a_transport_that_the_trainer_lacks_is_refused_with_its_install_command(without_nixl):
    with pytest.raises(UnsupportedOption, match=r"the trainer has no transport nixl: pip install 'weightsync\[nixl\]'"):
        registry.pick("nixl", HERE, engine(ALL))


@pytest.mark.parametrize(
    ("user", "why", "advice"),
    [
        ("65534 7", "the same host, but user 65534's and not user {}'s", "run both as the same"),
        ("65534", "the same host, but user 65534's and not user {}'s", "run both as the same"),
        ("{} 7", "the same host, but in another user namespace", "--userns=host"),
        ("{}", "the same host, but in another user namespace", "--userns=host"),
    ],
)
def test_an_engine_that_does_not_share_the_trainers_directory_is_reached_over_the_network(user, why, advice):
    own = os.geteuid()
    hello = msgspec.structs.replace(engine(ALL, host=arenas.host_id()), user=user.format(own))
    assert registry.pick("auto", HERE, hello) == ("nixl", f"{why.format(own)}, and both sides have NIXL")
    with pytest.raises(UnsupportedOption, match=rf"{HERE} runs on {why.format(own)}: transport ipc_zmq .*{advice}"):
        registry.pick("ipc_zmq", HERE, hello)


def test_a_trainer_without_a_private_directory_reaches_engines_over_the_network(own_homes):
    whole = msgspec.structs.replace(engine(ALL, host=arenas.host_id()), user=directories.meeting())
    assert registry.pick("auto", HERE, whole)[0] == "ipc_zmq"
    own_homes[0].chmod(0o777)  # as if another user had created it
    assert directories.meeting() == str(os.geteuid())
    for hello in (whole, msgspec.structs.replace(whole, user=directories.meeting())):
        transport, reason = registry.pick("auto", HERE, hello)
        assert transport == "nixl"
        assert f"{own_homes[0]} cannot be trusted: its mode is 0777" in reason


def test_an_older_engine_is_reached_through_shared_memory_or_not_at_all():
    old = http.RankInfo(rank=0, pid=0, device="cpu")
    assert registry.pick("auto", HERE, hello_of(old, host=arenas.host_id()))[0] == "ipc_zmq"
    with pytest.raises(UnsupportedOption, match=f"{HERE} has no transport nccl"):
        registry.pick("nccl", HERE, hello_of(old, host=FAR))
