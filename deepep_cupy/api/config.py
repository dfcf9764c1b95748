"""The constructor's arguments: checked alone, compared across ranks, turned into a ``BufferSpec``.

All ranks exchange their complaints before any of them raises, so that no rank is left waiting in
the constructor.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from deepep_cupy import env
from deepep_cupy.api.values import is_int, resolve_dtype, wrong_number
from deepep_cupy.engines.select import ENGINES
from deepep_cupy.errors import ContractError, DeepEPCupyError, PlatformError, described, shown
from deepep_cupy.protocol.control_block import ControlLayout
from deepep_cupy.protocol.headers import REGION_BYTES
from deepep_cupy.protocol.nodes import MAX_RANKS_PER_NODE, NodeMap, Place, map_nodes
from deepep_cupy.protocol.sizes import (
    MAX_BLOCKS_WANTED,
    MAX_EXPERTS,
    MAX_LOW_LATENCY_EXPERTS,
    MAX_LOW_LATENCY_IN_FLIGHT,
    MAX_LOW_LATENCY_TOKENS,
    MAX_ROW_BYTES,
    MAX_ROWS,
    MAX_TIMEOUT_S,
    MAX_TOPK,
    BufferSpec,
)
from deepep_cupy.ranks.group import Group

__all__ = [
    "BufferArguments",
    "Config",
    "agree",
]


# ------------------------ ``Config``: DeepEP V1's settings of queues, of which there are none here


@dataclass(frozen=True)
class Config:
    """Settings of one call, as DeepEP V1 has them. Only ``num_sms`` has an effect here.

    Rows go straight to their final place: there are no queues whose chunks could be tuned, so
    that the other numbers are accepted, checked and not used.

    Attributes:
        num_sms: GPU blocks of the call; odd numbers are fine too. None: the Buffer's number. The
            host engine has no blocks.
        num_max_nvl_chunked_send_tokens: Not used.
        num_max_nvl_chunked_recv_tokens: Not used.
        num_max_rdma_chunked_send_tokens: Not used.
        num_max_rdma_chunked_recv_tokens: Not used.
    """

    num_sms: int | None = None
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            high = MAX_BLOCKS_WANTED if field.name == "num_sms" else MAX_ROWS
            if value is None and field.name == "num_sms":
                continue
            complaint = wrong_number(field.name, value, 1, high)
            if complaint is not None:
                raise ContractError(f"Config(): {complaint}.")


_LOCAL_FIELDS = ("num_sms", "device")
"""Arguments that may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class BufferArguments:
    """What the user passed to ``Buffer``; see there."""

    num_max_tokens_per_rank: Any
    hidden: Any
    num_topk: Any
    num_experts: Any
    dtype: Any
    pool_bytes: Any
    num_sms: Any
    engine: Any
    device: Any
    timeout_s: Any
    ranks_per_node: Any
    low_latency_tokens: Any = 0
    low_latency_in_flight: Any = 1

    def completed(self) -> BufferArguments:
        """With what the environment says where an argument is not given."""
        if self.ranks_per_node is not None:
            return self
        return replace(self, ranks_per_node=env.ranks_per_node())

    def patience(self) -> float:
        """Seconds to wait for the other ranks, with which nothing has been agreed on yet."""
        seconds = self.timeout_s
        right = isinstance(seconds, int | float) and 0 < seconds <= MAX_TIMEOUT_S
        return float(seconds) if right else 100.0

    def complaint(self, num_ranks: int) -> str | None:
        """What is wrong with them, as far as one rank can tell; ``None`` if nothing is."""
        for name, low, high, optional in (
            ("num_max_tokens_per_rank", 1, 1 << 30, False),
            ("hidden", 1, 1 << 30, False),
            ("num_topk", 0, MAX_TOPK, False),
            ("num_experts", 1, MAX_EXPERTS, True),
            ("pool_bytes", 1, REGION_BYTES, True),
            ("num_sms", 1, MAX_BLOCKS_WANTED, True),
            ("device", 0, 1 << 16, True),
            ("ranks_per_node", 1, 1 << 16, True),
            ("low_latency_tokens", 0, MAX_LOW_LATENCY_TOKENS, False),
            ("low_latency_in_flight", 1, MAX_LOW_LATENCY_IN_FLIGHT, False),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            complaint = wrong_number(name, value, low, high)
            if complaint is not None:
                return complaint
        if self.num_experts is not None and self.num_experts % num_ranks:
            return (
                f"argument 'num_experts' must be a multiple of the {num_ranks} ranks, got "
                f"{self.num_experts}"
            )
        if self.num_topk > 0 and self.num_experts is None:
            return (
                f"argument 'num_experts' must be given where num_topk = {self.num_topk}; "
                f"num_topk=0 is for dispatch by is_token_in_rank alone"
            )
        return (
            self._complaint_about_the_rest()
            or self._complaint_about_products(num_ranks)
            or self._complaint_about_low_latency()
        )

    def _complaint_about_low_latency(self) -> str | None:
        tokens, most = self.low_latency_tokens, self.num_max_tokens_per_rank
        if not tokens:
            return None
        if tokens > most:
            return (
                f"argument 'low_latency_tokens' must be at most num_max_tokens_per_rank = {most}, "
                f"got {tokens}"
            )
        if self.num_topk == 0 or self.num_experts > MAX_LOW_LATENCY_EXPERTS:
            return (
                f"argument 'low_latency_tokens' needs num_topk >= 1 and at most "
                f"{MAX_LOW_LATENCY_EXPERTS} experts, got num_topk = {self.num_topk} and "
                f"num_experts = {self.num_experts}"
            )
        return None

    def _complaint_about_the_rest(self) -> str | None:
        seconds = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            return (
                f"argument 'timeout_s' must be a positive number of seconds, got {shown(seconds)}"
            )
        if not seconds <= MAX_TIMEOUT_S:
            return (
                f"argument 'timeout_s' must be a positive number of seconds up to "
                f"{MAX_TIMEOUT_S:g} (31 years), got {shown(seconds)}"
            )
        if not isinstance(self.engine, str) or self.engine not in ENGINES:
            names = ", ".join(ENGINES)
            return f"argument 'engine' must be one of {names}, got {shown(self.engine)}"
        try:
            resolve_dtype(self.dtype)
        except TypeError:
            return (
                f"argument 'dtype' must be a dtype of NumPy or ml_dtypes, got {shown(self.dtype)}"
            )
        return None

    def _complaint_about_products(self, num_ranks: int) -> str | None:
        """Sizes that are right one by one, and together more than 32-bit words can count."""
        spec = self.spec(0, num_ranks)
        if spec.max_row_bytes > MAX_ROW_BYTES:
            return (
                f"arguments 'hidden' and 'dtype' must make rows of at most {MAX_ROW_BYTES} bytes, "
                f"got {self.hidden} × {spec.itemsize}"
            )
        if spec.max_copies > MAX_ROWS:
            most = MAX_ROWS * spec.num_max_tokens_per_rank // spec.max_copies
            return (
                f"argument 'num_max_tokens_per_rank' must be at most {most} for {num_ranks} ranks "
                f"and num_topk = "
                f"{spec.num_topk}, because rows are counted in 32 bits, got "
                f"{self.num_max_tokens_per_rank}"
            )
        control = ControlLayout(num_ranks, spec.num_experts or 0).nbytes
        if (spec.pool_bytes or 0) > REGION_BYTES - control:
            return (
                f"argument 'pool_bytes' must be at most {REGION_BYTES - control} (64 GiB less what "
                f"the ranks' control block takes), got {self.pool_bytes}"
            )
        return None

    def comparable(self) -> dict[str, str]:
        """Field → text, for the fields that must be equal on all ranks."""
        texts = {
            each.name: shown(_plain(getattr(self, each.name)))
            for each in fields(self)
            if each.name not in _LOCAL_FIELDS
        }
        try:
            texts["dtype"] = repr(resolve_dtype(self.dtype).name)
        except TypeError:
            texts["dtype"] = shown(self.dtype)
        return texts

    def spec(self, rank: int, num_ranks: int) -> BufferSpec:
        """Sizes for the engine, from arguments that have been checked."""
        dtype = resolve_dtype(self.dtype)
        return BufferSpec(
            num_ranks=num_ranks,
            rank=rank,
            num_max_tokens_per_rank=int(self.num_max_tokens_per_rank),
            max_row_bytes=int(self.hidden) * dtype.itemsize,
            num_topk=int(self.num_topk),
            num_experts=None if self.num_experts is None else int(self.num_experts),
            timeout_s=float(self.timeout_s),
            pool_bytes=None if self.pool_bytes is None else int(self.pool_bytes),
            num_sms=None if self.num_sms is None else int(self.num_sms),
            dtype=dtype.name,
            itemsize=dtype.itemsize,
            low_latency_tokens=int(self.low_latency_tokens),
            low_latency_in_flight=int(self.low_latency_in_flight),
        )


def agree(group: Group, arguments: BufferArguments, version: str) -> BufferSpec:
    """Compare all ranks' arguments, versions and places. Collective, and blocking.

    Raises:
        ContractError: On every rank, when an argument is wrong or differs.
        PlatformError: On every rank, when these ranks cannot work together.
    """
    complaint = platform = unreadable = None
    mine: dict[str, str] = {}
    try:
        env.check()
        arguments = arguments.completed()
        complaint = arguments.complaint(group.size)
        platform = _complaint_about_ranks(group, arguments)
        mine = {"version of deepep_cupy": version, **arguments.comparable()}
    except ContractError as wrong:
        unreadable = str(wrong).rstrip(".")
    except Exception as other:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
        unreadable = described(other)
    place = Place(group.node_ranks[0], group.host)
    ranks = group.allgather((complaint, platform, mine, place, unreadable))
    _raise_first(ContractError, [each[4] for each in ranks], group.rank)
    _raise_first(PlatformError, [each[1] for each in ranks], group.rank)
    compared = [each[2] for each in ranks]
    for field in mine:
        values = [each.get(field) for each in compared]
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            error = ContractError(
                f"Buffer(): '{field}' must be the same on all ranks, got {listing}."
            )
            error.printed_elsewhere = group.rank > 0
            raise error
    _raise_first(ContractError, [each[0] for each in ranks], group.rank)
    nodes = _nodes(arguments, [each[3] for each in ranks], group.rank)
    return replace(arguments.spec(group.rank, group.size), nodes=nodes)


def _nodes(arguments: BufferArguments, places: list[Place], me: int) -> NodeMap:
    """Where the ranks are. The same answer, or the same error, on every rank."""
    pretended = arguments.ranks_per_node
    nodes = map_nodes(places, None if pretended is None else int(pretended))
    if isinstance(nodes, NodeMap):
        if nodes.num_nodes == 1 or not arguments.low_latency_tokens:
            return nodes
        nodes = (
            f"argument 'low_latency_tokens' must be 0 on several nodes ({nodes.num_nodes} here): "
            f"low-latency calls work within one, got {arguments.low_latency_tokens}"
        )
    kind = ContractError if nodes.startswith("argument") else PlatformError
    error = kind(f"Buffer(): {nodes}.")
    error.printed_elsewhere = me > 0
    raise error


def _raise_first(kind: type[DeepEPCupyError], complaints: list[str | None], me: int) -> None:
    for rank, complaint in enumerate(complaints):
        if complaint is not None:
            error = kind(f"Buffer(): {complaint}, on rank {rank}.")
            error.printed_elsewhere = rank != me
            raise error


def _complaint_about_ranks(group: Group, arguments: BufferArguments) -> str | None:
    """Why these ranks cannot share a Buffer, or ``None``."""
    launched = env.launcher_size()
    if group.world_size == 1 and launched > 1:
        return (
            f"mpirun started {launched} processes, but each sees a world of its own with 1 rank: "
            f"this mpirun belongs to another MPI than mpi4py uses; start with the mpirun beside "
            f"this Python, or install mpi4py for the MPI of that mpirun"
        )
    per_node = arguments.ranks_per_node
    several = len(group.node_ranks) < group.size or (is_int(per_node) and 0 < per_node < group.size)
    if group.size > MAX_RANKS_PER_NODE and not several:
        return (
            f"the communicator has {group.size} ranks, more than the {MAX_RANKS_PER_NODE} a Buffer "
            f"can join; split it into groups with comm.Split()"
        )
    return None


def _plain(value: Any) -> Any:
    """``np.int64(3)`` and 3 are the same argument, and so are 100 and 100.0 seconds."""
    if isinstance(value, np.generic):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() else value
