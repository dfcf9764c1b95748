"""Checks of the arguments of low-latency calls that one rank can make alone."""

from __future__ import annotations

from deepep_cupy.api.arguments import ArgumentChecker
from deepep_cupy.engines.calls import DispatchArguments
from deepep_cupy.errors import ContractError
from deepep_cupy.protocol.headers import Refusal, RefusalCode
from deepep_cupy.protocol.sizes import BufferSpec

__all__ = ["is_one"]


def is_one(
    checker: ArgumentChecker, spec: BufferSpec, given: DispatchArguments, num_tokens: int
) -> bool:
    """Whether a dispatch is a low-latency one, which only some can be."""
    operation = "dispatch"
    if not checker.flag(operation, "low_latency", given.options.low_latency):
        return False
    checker.need(operation, "low_latency", "low_latency")
    most = spec.low_latency_tokens
    if not most:
        checker.refuse(
            operation,
            "low_latency",
            "needs a Buffer made with low_latency_tokens, the most tokens of a rank in such a "
            "call, which is 0 here",
        )
    for other in ("handle", "is_token_in_rank", "dest"):
        if getattr(given, other) is not None:
            checker.refuse(
                operation,
                other,
                "must not be given with low_latency=True: such calls are routed by topk_idx "
                "alone, each anew",
            )
    if num_tokens > most:
        raise ContractError(
            f"{operation}(): argument 'x' must have at most low_latency_tokens = {most} rows with "
            f"low_latency=True, got {num_tokens}, on rank {spec.rank}.",
            Refusal(RefusalCode.MORE_THAN_CALL_TAKES, num_tokens),
        )
    return True
