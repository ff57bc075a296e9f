"""Zero-filled device memory between unmapped addresses, from CUDA's virtual memory management.

PyTorch's allocator maps more than was asked for, and what lies behind a tensor is chance. The
driver's own calls reserve addresses first and map memory to some of them, so that a kernel that
reads one byte further meets no page and dies. See "Virtual Memory Management" in the CUDA driver
API; the constants are those of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch

_ALLOCATION_TYPE_PINNED = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_READ_WRITE = 3
_GRANULARITY_MINIMUM = 0


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    size, address, handle = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
    driver.cuMemAddressReserve.argtypes = [
        ctypes.POINTER(address), size, size, address, ctypes.c_uint64
    ]  # fmt: skip
    driver.cuMemCreate.argtypes = [
        ctypes.POINTER(handle), size, ctypes.POINTER(_AllocationProperties), ctypes.c_uint64
    ]  # fmt: skip
    driver.cuMemMap.argtypes = [address, size, size, handle, ctypes.c_uint64]
    driver.cuMemSetAccess.argtypes = [address, size, ctypes.POINTER(_Access), size]
    driver.cuMemUnmap.argtypes = [address, size]
    driver.cuMemRelease.argtypes = [handle]
    driver.cuMemAddressFree.argtypes = [address, size]
    return driver


def _call(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise OSError(code, f"{name}: {(text.value or b'unknown error').decode()}")


class Block:
    """Mapped device memory with unmapped addresses on both sides; freed with its last tensor.

    Attributes:
        nbytes: its size, what was asked for rounded up to whole pages (2 MiB on most devices).
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Map at least ``nbytes`` bytes.

        Raises:
            OSError: if there is no CUDA driver, or it refuses.
        """
        torch.cuda.synchronize(device)  # makes the context that the driver's calls need
        number = torch.cuda.current_device() if device.index is None else device.index
        where = _Location(_LOCATION_TYPE_DEVICE, number)
        properties = _AllocationProperties(type=_ALLOCATION_TYPE_PINNED, location=where)
        page = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(page), ctypes.byref(properties), _GRANULARITY_MINIMUM,
        )  # fmt: skip
        self.device = device
        self.nbytes = -(-nbytes // page.value) * page.value
        reserved, handle = ctypes.c_uint64(), ctypes.c_uint64()
        whole = self.nbytes + 2 * page.value
        _call("cuMemAddressReserve", ctypes.byref(reserved), whole, 0, 0, 0)
        _call("cuMemCreate", ctypes.byref(handle), self.nbytes, ctypes.byref(properties), 0)
        self._first = reserved.value + page.value
        _call("cuMemMap", self._first, self.nbytes, 0, handle.value, 0)
        access = _Access(where, _ACCESS_READ_WRITE)
        _call("cuMemSetAccess", self._first, self.nbytes, ctypes.byref(access), 1)
        free = weakref.finalize(
            self, _free, self._first, self.nbytes, handle.value, reserved.value, whole
        )
        free.atexit = False  # the driver may be gone by then
        self.tensor(0, self.nbytes, torch.uint8).zero_()

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor over ``count`` elements from byte ``offset`` on, as long as its storage."""
        raw = torch.as_tensor(_Bytes(self, self._first + offset, count * dtype.itemsize))
        return raw.view(dtype)


class _Bytes:
    """Bytes in the form that ``torch.as_tensor`` takes; keeps their block alive."""

    def __init__(self, block: Block, address: int, nbytes: int) -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _free(first: int, nbytes: int, handle: int, reserved: int, whole: int) -> None:
    torch.cuda.synchronize()
    _call("cuMemUnmap", first, nbytes)
    _call("cuMemRelease", handle)
    _call("cuMemAddressFree", reserved, whole)
