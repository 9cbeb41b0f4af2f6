"""Memory of arenas: provided at once, and shared although the allocator uses expandable segments."""

import ctypes
import mmap

import pytest
import torch

from weightsync.memory import arenas, cuda_ipc

SETTINGS = "max_split_size_mb:512,expandable_segments:True"


def settings():
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def restored():
    before = settings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


def test_expandable_segments_are_turned_off_and_other_settings_kept():
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    with cuda_ipc.unexpandable():
        assert settings() == "max_split_size_mb:512,expandable_segments:False"
    assert settings() == SETTINGS


def test_expandable_segments_are_restored_after_a_failure():
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    with pytest.raises(RuntimeError), cuda_ipc.unexpandable():
        torch.zeros(1 << 60, dtype=torch.uint8)
    assert settings() == SETTINGS


@pytest.mark.parametrize("others", ["", "max_split_size_mb:512", "expandable_segments:False"])
def test_settings_without_expandable_segments_are_unchanged(others):
    torch._C._accelerator_setAllocatorSettings(others)
    with cuda_ipc.unexpandable():
        assert settings() == others
    assert settings() == others


def test_plain_memory_is_zeroed():
    memory = arenas.plain(1000, torch.device("cpu"))
    assert memory.shape == (1000,)
    assert memory.dtype == torch.uint8
    assert not memory.any()


def present(memory):
    """How many of the pages of some memory the system has provided."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(memory.data_ptr() + memory.numel() - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("offset", [0, 1, 4097])
def test_every_page_of_new_memory_is_provided_little_at_once(offset):
    memory = torch.frombuffer(mmap.mmap(-1, 5 << 20), dtype=torch.uint8)[offset:]
    before, looks = present(memory), []
    assert before == 0
    assert arenas.populate(memory, lambda: looks.append(present(memory)))
    assert looks[0] < looks[-1] == present(memory) == -(-memory.numel() // mmap.PAGESIZE)
    assert not memory.any()


def test_what_is_in_the_memory_stays():
    memory = torch.arange(1 << 20)
    assert arenas.populate(memory.view(torch.uint8))
    assert torch.equal(memory, torch.arange(1 << 20))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_memory_that_cannot_be_provided_is_no_error():
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ), dtype=torch.uint8)
    assert not arenas.populate(memory)
