"""All kernels of this package, by name."""

from __future__ import annotations

from collections.abc import Iterable

from deepep_cupy.errors import ContractError
from deepep_cupy.kernels.spec import KernelSpec, Param, Struct

__all__ = ["COMM_PARAMS", "KERNELS", "get_kernel", "list_kernels"]

COMM_PARAMS = Struct(
    "CommParams",
    (
        Param("peer", "u8*", "kNumRanks", "regions of all ranks as mapped here"),
        Param("report", "u64*", None, "report on the host, plan/layout.py"),
        Param("board", "u64*", None, "abort words of all ranks on the host, or 0"),
        Param("timeout_ns", "u64", None, "nanoseconds any wait may last"),
        Param("rank", "u32", None, "this rank, [0, kNumRanks)"),
        Param("serial", "u32", None, "number of this call, never 0"),
        Param("kind", "u32", None, "kKind..."),
        Param("refusal", "u32", None, "kRefusal..., 0 for none"),
        Param("refusal_value", "u32", None, "the token or the wrong size"),
        Param("board_stride", "u32", None, "words between two ranks' lines of the board"),
    ),
    "What communication needs, the same in every kernel.",
)

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="barrier",
        source="barrier.cu",
        entry="barrier",
        params=(Param("comm", COMM_PARAMS),),
        doc="no rank leaves before all have come; also how a rank refuses an operation",
        shared_bytes="kBarrierSharedBytes",
    ),
)
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
