"""Kernel text to cubin to launch, and the text itself for whoever wants to read it.

The order data passes through: ``spec`` and ``registry`` (what a kernel is), ``source`` (one
string), ``compile``, ``cache`` and ``build`` (PTX and cubin, once a node), ``launch`` (prepacked
calls), ``ptx_module`` (hand-written PTX), ``inspect`` (what the compiler made of it).
"""

from __future__ import annotations

from deepep_cupy.kernels.build import kernel_options, kernel_ptx, kernel_source
from deepep_cupy.kernels.registry import get_kernel, list_kernels

__all__ = ["get_kernel", "kernel_options", "kernel_ptx", "kernel_source", "list_kernels"]
