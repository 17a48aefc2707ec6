"""The CUDA device's own bookkeeping, with a stand-in for the driver: no GPU is at hand."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")

import torch

from simlab.errors import SimlabError
from simlab.live.cuda import CudaDevice

MIB = 2**20


class Driver:
    """What torch.cuda.cudart() gives: remembers what is pinned; ``code`` is what it answers."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return found


def device() -> Any:
    """A CudaDevice that never looked for a GPU."""
    found = object.__new__(CudaDevice)
    found.torch, found.name, found.place = torch, "a GPU", torch.device("cpu")
    found._registered = []
    return found


def test_large_memory_is_pinned_exactly_and_given_back(driver: Driver) -> None:
    gpu = device()
    tensors = [gpu.pinned((n, MIB), torch.uint8, "the bank") for n in (1, 3)]
    assert driver.pinned == {t.data_ptr(): t.numel() for t in tensors}
    assert all(t.data_ptr() % 4096 == 0 for t in tensors)  # pages of their own
    gpu.close()
    assert driver.pinned == {}
    gpu.close()  # twice is once


def test_memory_that_cannot_be_pinned_is_one_line(driver: Driver) -> None:
    gpu = device()
    gpu.pinned((MIB,), torch.uint8, "the bank")
    driver.code = 2  # cudaErrorMemoryAllocation
    with pytest.raises(SimlabError, match=r"the bank: 2\.00 MiB of host memory cannot be pinned"):
        gpu.pinned((2 * MIB,), torch.uint8, "the bank")
    gpu.close()
    assert driver.pinned == {}  # what was pinned before is not forgotten


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU this memory can be pinned")
def test_small_memory_that_cannot_be_pinned_is_one_line(driver: Driver) -> None:
    with pytest.raises(SimlabError, match=r"router ids: 0\.00 MiB of host memory cannot be pinned"):
        device().pinned((8,), torch.int64, "router ids")


def test_device_memory_that_is_short_is_one_line(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (5 * MIB, 100 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 30 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 10 * MIB)
    gpu = device()
    assert gpu.free_memory() == 25 * MIB
    with pytest.raises(SimlabError, match=r"26 MiB of memory on a GPU, 25 MiB are free; take few"):
        gpu.empty((26, MIB), torch.uint8, "the slot pool (26 slots)")


def test_out_of_memory_in_spite_of_what_was_free_is_one_line(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 MiB")

    gpu = device()
    monkeypatch.setattr(gpu, "free_memory", lambda: 100 * MIB)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(SimlabError, match="the slot pool takes") as failure:
        gpu.empty((MIB,), torch.uint8, "the slot pool")
    assert "\n" not in str(failure.value)
