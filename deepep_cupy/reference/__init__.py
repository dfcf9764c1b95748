"""What the answer must be: dispatch and combine of all ranks in one process, in plain NumPy.

This package is the specification of the library. Its docstrings state every rule of the exact
results, its code is the shortest program that follows them, and both engines are tested against
it bit by bit. It imports NumPy, ml_dtypes and nothing else of this library.

Letters, used everywhere:

=====  =======================================================================================
R      ranks, numbered 0..R-1
T      tokens of one rank, 0 or more; ranks may differ
H      elements of a row, equal on all ranks; a row is ``H * itemsize`` bytes
K      choices per token, equal on all ranks
E      experts in all, a multiple of R
El     ``E / R``: rank r owns the experts ``r * El`` to ``(r + 1) * El - 1``
N      tokens one rank receives in a dispatch, and rows unless expanded; ranks may differ
S      scales of a row, where FP8 rows travel with scales
=====  =======================================================================================

Every function takes and returns lists with one entry per rank. In the library each rank passes
and gets its own entry; nothing else differs. K, E, R, H and the row dtype are arguments of a call
here; a ``Buffer`` only bounds them (``K <= num_topk``, row bytes ``<= hidden * itemsize``,
``T <= num_max_tokens_per_rank``), so any smaller call is as good as the largest.

All results are deterministic: the same input gives the same bits, on any engine, with any
number of blocks, in any order in which ranks arrive.

A call that breaks a rule raises here ``ValueError``, and in the library ``ContractError`` (a
``ValueError`` too) **on every rank**; nothing has moved then, and the Buffer stays usable.
"""

from deepep_cupy.reference.combine import CombineResult, combine
from deepep_cupy.reference.dispatch import DispatchResult, dispatch
from deepep_cupy.reference.layout import DispatchLayout, Handle, get_dispatch_layout
from deepep_cupy.reference.low_latency import (
    LowLatencyResult,
    low_latency_combine,
    low_latency_dispatch,
)
from deepep_cupy.reference.quant import dequantize, quantize

__all__ = [
    "CombineResult",
    "DispatchLayout",
    "DispatchResult",
    "Handle",
    "LowLatencyResult",
    "combine",
    "dequantize",
    "dispatch",
    "get_dispatch_layout",
    "low_latency_combine",
    "low_latency_dispatch",
    "quantize",
]
