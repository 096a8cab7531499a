"""Virtual memory of a GPU through the vendor's driver: `libcuda` of CUDA, `libamdhip64` of ROCm.

The two have equal functions, structures and numbers under other names. Not run on hardware yet; the code
above it is tested with a driver of the tests' own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nereus.emu.device_pages import Driver

PINNED, ON_DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0
OUT_OF_MEMORY = 2  # of both vendors
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
NAMES: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        "granularity": "cuMemGetAllocationGranularity",
        "reserve": "cuMemAddressReserve",
        "create": "cuMemCreate",
        "map": "cuMemMap",
        "access": "cuMemSetAccess",
        "unmap": "cuMemUnmap",
        "release": "cuMemRelease",
        "free": "cuMemAddressFree",
    },
    "hip": {
        "granularity": "hipMemGetAllocationGranularity",
        "reserve": "hipMemAddressReserve",
        "create": "hipMemCreate",
        "map": "hipMemMap",
        "access": "hipMemSetAccess",
        "unmap": "hipMemUnmap",
        "release": "hipMemRelease",
        "free": "hipMemAddressFree",
    },
}


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("meta", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


@dataclass(frozen=True)
class _Bytes:
    """What torch makes a tensor of; the tensor keeps it, and so the range."""

    address: int
    num_bytes: int
    owner: object

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class GpuDriver:
    """See Driver."""

    def __init__(self, device: torch.device, library: ctypes.CDLL, vendor: str) -> None:
        """Raises OSError where the library lacks a function or the device the feature."""
        self._device = device
        self._index = device.index or 0
        self._vendor = vendor
        try:
            self._calls = {word: library[name] for word, name in NAMES[vendor].items()}
        except AttributeError as error:
            raise OSError(str(error)) from error
        self._properties = _Properties(type=PINNED, location=_Location(ON_DEVICE, self._index))
        found = c_size_t()
        self._call("granularity", byref(found), byref(self._properties), MINIMUM)
        self.granularity = found.value

    def reserve(self, num_bytes: int) -> int:
        """See Driver."""
        address = c_ulonglong()
        none = c_size_t(0)
        self._call("reserve", byref(address), c_size_t(num_bytes), none, c_ulonglong(0), c_ulonglong(0))
        return address.value

    def map(self, address: int, num_bytes: int) -> int:
        """See Driver."""
        handle = c_ulonglong()
        size = c_size_t(num_bytes)
        self._call("create", byref(handle), size, byref(self._properties), c_ulonglong(0))
        try:
            self._call("map", c_ulonglong(address), size, c_size_t(0), handle, c_ulonglong(0))
            access = _Access(_Location(ON_DEVICE, self._index), READ_WRITE)
            self._call("access", c_ulonglong(address), size, byref(access), c_size_t(1))
        except OSError:
            self._call("release", handle)
            raise
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        """See Driver."""
        self._call("unmap", c_ulonglong(address), c_size_t(num_bytes))
        self._call("release", c_ulonglong(handle))

    def free(self, address: int, num_bytes: int) -> None:
        """See Driver."""
        self._call("free", c_ulonglong(address), c_size_t(num_bytes))

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """See Driver."""
        return torch.as_tensor(_Bytes(address, num_bytes, owner), device=self._device)

    def trim(self) -> None:
        """See Driver."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """See Driver."""
        torch.cuda.synchronize(self._device)

    def _call(self, word: str, *arguments: object) -> None:
        """Raises MemoryError when the device has no room, OSError with the vendor's code otherwise."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device)  # torch's context is the thread's from here on
            code = self._calls[word](*arguments)
        if code == OUT_OF_MEMORY:
            raise MemoryError(f"{NAMES[self._vendor][word]}: out of memory")
        if code:
            raise OSError(f"{NAMES[self._vendor][word]} gave {code}")


@lru_cache(maxsize=16)
def gpu_driver(device: torch.device) -> Driver | None:
    """The driver of a GPU; None where it is absent, or too old for this."""
    if not torch.cuda.is_available():
        return None
    try:
        vendor, library = vendor_library()
        return GpuDriver(device, library, vendor)
    except OSError:
        return None


def vendor_library() -> tuple[str, ctypes.CDLL]:
    """The vendor that torch was built for, and its driver. Raises OSError where that is absent."""
    vendor = "hip" if torch.version.hip else "cuda"
    return vendor, ctypes.CDLL(LIBRARIES[vendor])
