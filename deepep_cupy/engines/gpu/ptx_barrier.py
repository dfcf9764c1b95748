"""The hand-written barrier, launched as the compiled one is.

``ptx/peer_barrier.sm_80.ptx`` serves any number of ranks: what the CUDA text has as constants of
its prelude are parameters there, under the same names (``kWordKind`` is ``word_kind``). Its values
are taken from the mapping that the twin is compiled with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepep_cupy.engines.gpu.kernels import get_kernel
from deepep_cupy.engines.gpu.ptx_modules import PtxEntry, get_module, load_entry
from deepep_cupy.errors import ContractError
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.jit.launch import Driver, Launch
from deepep_cupy.protocol.headers import call_word

__all__ = ["PtxBarrier", "ptx_barrier_values"]

_NAME = "peer_barrier"
_MAX_RANKS = 8
_MAX_HEADER_WORDS = 32
"""Threads of a block: a warp for each rank, a lane for each word."""


class PtxBarrier:
    """The barrier of one Buffer; it is called as ``launch.ReadyLaunch`` of ``barrier`` is.

    Args:
        constants: What the Buffer's kernels are compiled with.
        comm: A value for every field of ``CommParams``.
        loaded: The function; ``None`` loads it on the current device.
        driver: Driver calls; ``None`` for ``cuda.bindings``.

    Raises:
        CompileError: The driver does not take the module.
        ContractError: There are more ranks, or longer headers, than the module can serve.
    """

    def __init__(
        self,
        constants: Mapping[str, int],
        comm: Mapping[str, Any],
        *,
        loaded: Loaded | None = None,
        driver: Driver | None = None,
    ) -> None:
        module = get_module(_NAME)
        entry = module.entry(_NAME)
        values = ptx_barrier_values(entry, constants, comm)
        if loaded is None:
            loaded, entry = load_entry(module, _NAME)
        self._launch = Launch(loaded, entry, constants, grid=1, values=values, driver=driver)
        slot = self._launch.slot
        self._serial, self._kind = slot("serial"), slot("kind")
        self._operation: int = self._kind[0]
        self._refusal, self._refusal_value = slot("refusal"), slot("refusal_value")

    def refusal(self, kind: int, code: int, value: int) -> None:
        """Set which operation this is, and why it is refused (code 0: it is not)."""
        self._operation = int(kind)
        self._refusal[0] = code
        self._refusal_value[0] = value & 0xFFFFFFFF

    def __call__(self, serial: int, stream: int, identity: int = 0) -> None:
        """Launch. ``identity``: see ``protocol.headers.call_word``."""
        self._serial[0], self._kind[0] = serial, call_word(self._operation, identity)
        self._launch(stream)


def ptx_barrier_values(
    entry: PtxEntry, constants: Mapping[str, int], comm: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of all parameters of the entry: fields of ``CommParams``, else constants by name."""
    words, ranks = constants["kHeaderWords"], constants["kNumRanks"]
    if ranks > _MAX_RANKS or words > _MAX_HEADER_WORDS:
        raise ContractError(
            f"ptx/{_NAME}: it serves at most {_MAX_RANKS} ranks and headers of "
            f"{_MAX_HEADER_WORDS} words, got {ranks} ranks and {words} words"
        )
    fields = get_kernel("barrier").layout(constants).fields
    values: dict[str, Any] = {}
    for param in entry.params:
        if f"comm.{param.name}" in fields:
            values[param.name] = comm[param.name]
        else:
            values[param.name] = constants["k" + param.name.title().replace("_", "")]
    values["peer"] = [*comm["peer"], *[0] * (_MAX_RANKS - ranks)]
    return values
