"""What the C library keeps of freed memory, in a process that does nothing but serve."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def share_freed_memory() -> bool:
    """Lets all threads allocate from one place, which keeps what they free.

    By itself glibc has memory apart for each of many threads, so that messages that come one after
    the other take memory again and again; and it gives freed memory back to the system, which has
    to fill it with zeros for the next message. To be called before there are threads.

    Returns:
        Whether it was done: not outside of glibc, nor where the environment says otherwise.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _VARIABLES):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = {
        _ARENA_MAX: 1,
        _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD,
        _TRIM_THRESHOLD: 2**30,
    }
    return all([set_option(option, value) == 1 for option, value in options.items()])
