"""verl's checkpoint engines where verl is not: what they refuse before anything else, and how they are found."""

import asyncio
import threading
from importlib.metadata import entry_points

import pytest
import torch

from weightsync.errors import PushTimeout, SourceError, TransferFailed, UnsupportedOption
from weightsync.integrations import verl
from weightsync.integrations.verl_worker import Handover

PATIENCE_S = 60.0


def test_verl_finds_the_module_by_its_entry_point():
    assert [point.value for point in entry_points(group="verl.plugins", name="weightsync")] == [verl.__name__]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return ``installed(version)``: the metadata of this version of verl can be found."""

    def install(version):
        (tmp_path / f"verl-{version}.dist-info").mkdir()
        (tmp_path / f"verl-{version}.dist-info" / "METADATA").write_text(f"Name: verl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.mark.parametrize("kind", [verl.ServersEngine, verl.TransferEngine])
def test_another_version_of_verl_is_refused_in_one_line(installed, kind):
    installed("0.8.0")
    with pytest.raises(UnsupportedOption) as refusal:
        kind(bucket_size=1, model="model")
    assert "knows verl 0.9.1, and 0.8.0 is installed: pip install 'verl==0.9.1'" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_transfer_needs_the_models_folder_and_no_deep_check(installed):
    installed("0.9.1")
    with pytest.raises(UnsupportedOption, match="weightsync_transfer checks that a push is complete"):
        verl.TransferEngine(bucket_size=1)
    with pytest.raises(UnsupportedOption, match="verify='deep'"):
        verl.TransferEngine(bucket_size=1, model="model", verify="deep")


def read(handover, stops_after=None):
    """What a coroutine takes of a hand-over, in a task of its own."""

    async def take():
        taken = []
        while (pair := await handover.next(PATIENCE_S)) is not None:
            taken.append(pair[0])
            if len(taken) == stops_after:
                raise ValueError("no memory")
        return taken

    return asyncio.run(take())


def load(handover, names, raised):
    try:
        for name in names:
            handover.give(name, torch.zeros(1), PATIENCE_S)
        handover.finish(PATIENCE_S)
    except Exception as error:
        raised.append(error)


@pytest.mark.parametrize("stops_after", [None, 1, 2])
def test_a_load_ends_when_its_reader_has_ended(stops_after):
    handover, raised = Handover(), []
    loading = threading.Thread(target=load, args=(handover, ["a", "b", "c"], raised))
    loading.start()
    if stops_after is None:
        assert read(handover) == ["a", "b", "c"]
    else:
        with pytest.raises(ValueError, match="no memory"):
            read(handover, stops_after)
    loading.join(PATIENCE_S)
    assert not loading.is_alive()
    assert [type(error) for error in raised] == ([] if stops_after is None else [TransferFailed])
    assert all("ValueError: no memory" in str(error) for error in raised)


def test_a_push_that_failed_is_raised_where_it_is_read():
    handover = Handover()
    handover.end(SourceError("tensor a is on the meta device"))
    with pytest.raises(SourceError, match="tensor a"):
        read(handover)


def test_nobody_waits_for_ever():
    with pytest.raises(PushTimeout, match="the trainer's first worker was silent"):
        asyncio.run(Handover().next(0.01))
    handover = Handover()
    handover.give("a", torch.zeros(1), PATIENCE_S)
    with pytest.raises(PushTimeout, match="took no tensor within"):
        handover.give("b", torch.zeros(1), 0.01)
