"""Pages of host memory that stay where they are, so that a GPU copies from and to them by itself.

By the vendor's driver, as `gpu_driver`: a refusal by CUDA's runtime would be torch's next error. Not run on
hardware yet; tested with a library of the tests' own.
"""

from __future__ import annotations

import weakref
from ctypes import c_size_t, c_uint, c_void_p
from functools import partial

from torch import Tensor

from nereus.emu.gpu_driver import vendor_library

NAMES = {
    "cuda": ("cuMemHostRegister_v2", "cuMemHostUnregister"),
    "hip": ("hipHostRegister", "hipHostUnregister"),
}
FOR_ALL_CONTEXTS = 1


def lock_pages(flat: Tensor) -> bool:
    """Lock the pages of a tensor in host memory until it is gone; whether that was possible.

    The process has used its GPU before, in this thread.
    """
    address, num_bytes = c_void_p(flat.data_ptr()), flat.numel() * flat.element_size()
    if not num_bytes:
        return False
    try:
        vendor, library = vendor_library()
        lock, unlock = NAMES[vendor]
        refused = library[lock](address, c_size_t(num_bytes), c_uint(FOR_ALL_CONTEXTS))
    except (OSError, AttributeError):
        return False
    if refused:
        if vendor == "hip":
            library["hipGetLastError"]()  # HIP has one interface, which would remember it
        return False
    weakref.finalize(flat, partial(library[unlock], address))
    return True
