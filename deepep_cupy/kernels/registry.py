"""All kernels of this package, by name."""

from __future__ import annotations

from collections.abc import Iterable

from deepep_cupy.errors import ContractError
from deepep_cupy.kernels.spec import KernelSpec

__all__ = ["KERNELS", "get_kernel", "list_kernels"]

KERNELS: tuple[KernelSpec, ...] = ()
"""In the order ``kernels list`` prints them."""


def list_kernels() -> tuple[KernelSpec, ...]:
    """Return the specs of all kernels. Local; needs neither CuPy nor MPI."""
    return KERNELS


def get_kernel(name: str, kernels: Iterable[KernelSpec] | None = None) -> KernelSpec:
    """Return the spec of one kernel.

    Raises:
        ContractError: There is no such kernel; the message lists those there are.
    """
    known = KERNELS if kernels is None else tuple(kernels)
    for spec in known:
        if spec.name == name:
            return spec
    names = ", ".join(spec.name for spec in known) or "none"
    raise ContractError(f"no kernel is named {name!r}; there are: {names}")
