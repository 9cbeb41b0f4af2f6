"""Parameters in shared memory are read where they are."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tools import models
from weightsync import Sender, in_place, wire
from weightsync.errors import TransferFailed
from weightsync.handles import InPlaceHandle
from weightsync.layout import Layout, digest_of, spec_of
from weightsync.sources import open_source
from weightsync.testing import ReferenceEngine

IN_PLACE = "shared memory already"


@pytest.fixture
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1)).share_memory()


def served_digest(engine):
    with Sender([engine.url]) as sender:
        return sender.status(digest=True)[engine.url].ranks[0].digest


def arenas():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"weightsync-{os.getpid()}-")]


@pytest.mark.parametrize("verify", ["digest", "off", "deep"])
def test_every_push_brings_what_the_parameters_hold_then_and_nothing_is_packed(engine, trained, verify):
    with Sender([engine.url], verify=verify) as sender:
        for round_ in range(5):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
            before = digest_of(trained.state_dict().items())
            result = sender.push(trained)
            assert IN_PLACE in result.staging_reason
            assert served_digest(engine) == before == digest_of(trained.state_dict().items())
            assert arenas() == []
            if round_ == 1:
                opened = os.listdir("/proc/self/fd")
        assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_a_parameter_that_moved_is_found_where_it_is(engine, trained):
    with Sender([engine.url]) as sender:
        sender.push(trained)
        parameter = next(trained.parameters())
        parameter.data = (parameter.data * 2).share_memory_()
        assert IN_PLACE in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def private(model):
    next(model.parameters()).data = next(model.parameters()).data.clone()


def inside_a_page(model):
    parameter = next(model.parameters())
    memory = torch.zeros(parameter.numel() + 8, dtype=parameter.dtype).share_memory_()
    parameter.data = memory[8:].view(parameter.shape).copy_(parameter.data)


@pytest.mark.parametrize("spoil", [private, inside_a_page])
def test_a_model_that_cannot_be_read_where_it_is_is_packed(engine, trained, spoil):
    with Sender([engine.url]) as sender:
        sender.push(trained)
        spoil(trained)
        assert IN_PLACE not in sender.push(trained).staging_reason
        assert served_digest(engine) == digest_of(trained.state_dict().items())
        trained.share_memory()


@pytest.mark.parametrize("options", [{"keep_previous": True}, {"staging": "none"}, {"bucket_bytes": 1 << 20}])
def test_what_is_asked_for_otherwise_is_done(engine, trained, options):
    with Sender([engine.url], **options) as sender:
        assert IN_PLACE not in sender.push(trained).staging_reason


class Gathering:
    """In the shape of vLLM's ``WeightSource``: every pass over it may cost a gather."""

    def __init__(self, model):
        source = open_source(model)
        self.passes, self._weights = 0, dict(zip((one.name for one in source.specs), source.tensors(), strict=True))

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=t.shape) for name, t in self._weights.items()]

    def __iter__(self):
        self.passes += 1
        return iter(self._weights.items())


def test_a_source_that_makes_its_tensors_is_read_once_a_push(engine, trained):
    weights = Gathering(trained)
    with Sender([engine.url]) as sender:
        assert IN_PLACE not in sender.push(weights).staging_reason
    assert weights.passes == 1
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_an_engine_that_comes_later_waits_for_the_next_push(engine, trained, model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as late, Sender([engine.url]) as sender:
        sender.push(trained)
        before = served_digest(late)
        assert sender.add_engine(late.url) is None, "the trainer may have changed its parameters since"
        assert served_digest(late) == before
        sender.push(trained)
        assert served_digest(late) == digest_of(trained.state_dict().items())


def test_one_memory_that_holds_all_tensors_is_mapped_in_one_piece():
    memory = torch.arange(6 * in_place.PAGE_BYTES // 4, dtype=torch.int32).share_memory_()
    tensors = list(torch.split(memory, in_place.PAGE_BYTES // 2))
    layout = Layout([spec_of(f"t{n}", tensor) for n, tensor in enumerate(tensors)], in_place.PAGE_BYTES)
    assert in_place.find(tensors) is not None
    arena = in_place.InPlaceArena(layout, tensors)
    assert len(arena.handle().parts) == 1
    assert torch.equal(in_place.attach(arena.handle()), memory.view(torch.uint8))


def test_a_rank_cannot_change_the_parameters():
    memory = torch.zeros(4096, dtype=torch.uint8).share_memory_()
    arena = in_place.InPlaceArena(Layout([spec_of("t", memory)], in_place.PAGE_BYTES), [memory])
    code = (
        "import sys\nfrom weightsync import in_place, wire\nfrom weightsync.handles import InPlaceHandle\n"
        "found = in_place.attach(wire.from_json(sys.argv[1], InPlaceHandle))\nfound[0] = 1"
    )

    done = subprocess.run([sys.executable, "-c", code, wire.to_json(arena.handle()).decode()], check=False)
    assert done.returncode < 0
    assert not memory.any()


def offered(**more):
    memory = torch.zeros(8192, dtype=torch.uint8).share_memory_()
    handle = in_place.InPlaceArena(Layout([spec_of("t", memory)], in_place.PAGE_BYTES), [memory]).handle()
    fields = {name: getattr(handle, name) for name in handle.__struct_fields__} | more
    return memory, InPlaceHandle(**fields)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pid": 2**22 + 5}, "cannot be opened.*bucket_bytes"),
        ({"parts": ((0, 0, 12288),)}, "refused to map 12288 bytes at 0"),
        ({"parts": ((0, 8192, 4096),)}, "refused to map"),
        ({"parts": ((0, -4096, 4096),)}, "refused to map"),
        ({"parts": ((0, 0, 100),)}, "refused to map"),
        ({"parts": ((7, 0, 4096),)}, "refused to map"),
        ({"parts": ((-1, 0, 4096),)}, "refused to map"),
    ],
)
def test_what_is_not_there_is_not_mapped(more, said):
    _memory, handle = offered(**more)
    with pytest.raises(TransferFailed, match=said):
        in_place.attach(handle)


def test_other_files_are_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        for number, known in ((file.fileno(), inode), (file.fileno(), inode + 1), (0, os.fstat(0).st_ino)):
            handle = InPlaceHandle(pid=os.getpid(), files=((number, known),), parts=((0, 0, 4096),))
            with pytest.raises(TransferFailed, match=r"refused to map|cannot be opened"):
                in_place.attach(handle)
