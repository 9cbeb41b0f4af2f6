"""Memory that is already shared is never moved, and is identified by the file behind it."""

import mmap
import os

import pytest
import torch
import torch.multiprocessing

from weightsync.memory import shared_parameters
from weightsync.memory.mappings import Mappings

CPU = torch.device("cpu")


@pytest.fixture
def strategy():
    """Set torch's sharing strategy until the end of the test."""
    before = torch.multiprocessing.get_sharing_strategy()
    yield torch.multiprocessing.set_sharing_strategy
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("now", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("then", ["file_descriptor", "file_system"])
def test_shared_memory_stays_in_place_when_the_sharing_strategy_changes(strategy, then, now):
    strategy(then)
    tensor = torch.arange(1 << 18).share_memory_()
    address = tensor.data_ptr()
    strategy(now)
    found = shared_parameters.find([tensor], CPU)
    assert tensor.data_ptr() == address
    # Only memory with an open descriptor can be shared with other processes.
    assert (found is not None) == (then == "file_descriptor")


def see(weights, looked, written, seen):
    """In another process: look whether the weights can be shared, then read them again."""
    shared_parameters.find([weights], CPU)
    looked.set()
    assert written.wait(60)
    seen.put(weights[0].item())


def test_a_learner_and_the_process_that_pushes_for_it_keep_sharing_memory(strategy):
    strategy("file_system")
    weights = torch.zeros(1 << 18).share_memory_()
    context = torch.multiprocessing.get_context("spawn")
    looked, written, seen = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=see, args=(weights, looked, written, seen))
    process.start()
    assert looked.wait(60)
    weights.fill_(7)
    written.set()
    assert seen.get(timeout=60) == 7
    process.join()


def test_the_file_behind_an_address_must_be_open_and_begin_there():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4 * mmap.PAGESIZE)
    with mmap.mmap(descriptor, 0) as whole, mmap.mmap(descriptor, 0, offset=mmap.PAGESIZE) as rest:
        for memory, nbytes, expected in (
            (whole, 4 * mmap.PAGESIZE, os.fstat(descriptor).st_ino),
            (whole, 4 * mmap.PAGESIZE + 1, None),
            (rest, 1, None),
        ):
            view = torch.frombuffer(memory, dtype=torch.uint8)
            found = Mappings().file(view.data_ptr(), nbytes)
            assert (None if found is None else found.inode) == expected
            del view
        view = torch.frombuffer(whole, dtype=torch.uint8)
        assert Mappings().file(view.data_ptr() + 1, 1) is None
        os.close(descriptor)
        duplicates = Mappings().file(view.data_ptr(), 1)
        # Python's mmap keeps a duplicate descriptor, through which others could open the file as well.
        assert duplicates is not None
        assert os.fstat(duplicates.descriptor).st_ino == duplicates.inode
        del view
    assert Mappings().file(torch.zeros(1 << 20).data_ptr(), 4) is None
    assert Mappings().file(0, 1) is None


def test_a_mapped_file_on_disk_is_not_shared(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert Mappings().file(tensor.data_ptr(), tensor.nbytes) is not None
        assert shared_parameters.find([tensor], CPU) is None
        del tensor
