"""A GPU as a device: CUDA, or a ROCm build of torch, which answers to the same names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from simlab.errors import SimlabError, UsageError
from simlab.live.device import MIB, Device, mib, size_of

#: Smaller host buffers come from torch's own pinned allocator, which rounds up to powers of two.
_REGISTER_FROM = MIB


class CudaDevice(Device):
    """A GPU that torch reaches through ``torch.cuda``: CUDA, or ROCm builds of torch."""

    kind = "cuda"
    note = ""

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        torch = self.torch
        if not torch.cuda.is_available():
            raise UsageError(
                "torch finds no CUDA device here; use --device cpu, or install a torch with CUDA"
                " and check the driver (nvidia-smi)"
            )
        count = torch.cuda.device_count()
        number = torch.cuda.current_device() if index is None else index
        if not 0 <= number < count:
            raise UsageError(f"there is no device cuda:{number}; there are {count}, from cuda:0")
        self.place = torch.device("cuda", number)
        torch.cuda.set_device(self.place)
        self.name = torch.cuda.get_device_name(self.place)
        # the current stream is where a model computes
        self.main = torch.cuda.current_stream(self.place)
        self.side = torch.cuda.Stream(self.place)
        self._registered: list[Any] = []

    def pinned(self, shape: Sequence[int], dtype: Any, what: str) -> Any:
        need = size_of(shape, dtype)
        if need < _REGISTER_FROM:
            try:
                return self.torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
            except RuntimeError:
                raise self._not_pinned(what, need) from None
        tensor = self.pageable(shape, dtype, what)
        # pins exactly these pages, where torch's pinned allocator would take up to twice as many
        code = self.torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), need, 0)
        if int(code) != 0:
            raise self._not_pinned(what, need)
        self._registered.append(tensor)
        return tensor

    @staticmethod
    def _not_pinned(what: str, need: int) -> SimlabError:
        return SimlabError(
            f"{what}: {mib(need)} of host memory cannot be pinned; take a smaller --bank-fraction,"
            " or raise the limit on locked memory (ulimit -l)"
        )

    def free_memory(self) -> int | None:
        free, _ = self.torch.cuda.mem_get_info(self.place)
        # what torch holds in reserve but does not use is free for this process
        reserve = self.torch.cuda.memory_reserved(self.place)
        return int(free) + int(reserve - self.torch.cuda.memory_allocated(self.place))

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.torch.cuda.stream(stream)
        return context

    def event(self, *, timed: bool = False) -> Any:
        return self.torch.cuda.Event(enable_timing=timed)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def finish(self, event: Any) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.place)

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            cudart = self.torch.cuda.cudart()
            for tensor in self._registered:
                cudart.cudaHostUnregister(tensor.data_ptr())
            self._registered.clear()
            self.torch.cuda.empty_cache()
