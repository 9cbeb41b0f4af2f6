"""Memory that can be shared although the allocator uses expandable segments, which cannot."""

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
