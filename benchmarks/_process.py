"""The memory of a process that computes stays with it."""

from __future__ import annotations

import ctypes
import functools
import platform

# Of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {
    _M_MMAP_THRESHOLD: 32 * 2**20,  # the most that glibc takes
    _M_TRIM_THRESHOLD: 2**31 - 1,
    _M_TOP_PAD: 64 * 2**20,
}


@functools.cache
def keep_freed_memory() -> bool:
    """Tells this process's allocator not to give freed memory back to the system.

    A gradient step frees and takes again some twenty arrays of n x n numbers. By default glibc
    returns them between steps, and the system clears every page anew: a quarter of a step at
    n = 700, and what made batches of fits slower than lone ones from n = 300 on. Only for
    processes whose purpose is such steps: they never shrink, up to 2 GiB.

    Returns:
        Whether the allocator took the settings; False where it is not glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) == 1 for name, value in _SETTINGS.items()])
