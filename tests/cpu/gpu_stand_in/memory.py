"""Memory by address."""

from __future__ import annotations

import ctypes

import numpy as np


def at(address, shape, dtype=np.int32):
    """Memory as an array."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if nbytes == 0:
        return np.zeros(shape, dtype)
    raw = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(raw, dtype).reshape(shape)
