"""Buffers that compiled programs may use, and what XLA's calls do with them."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from deepep_cupy.api.buffer import Buffer
from deepep_cupy.engines.calls import Array
from deepep_cupy.engines.gpu.engine import CudaEngine
from deepep_cupy.engines.gpu.routing import num_words
from deepep_cupy.errors import (
    ContractError,
    PeerAbortedError,
    PeerTimeoutError,
    PlatformError,
    StateError,
)
from deepep_cupy.jax.ffi import RECORDABLE, ErrorCode, Frame, make_handler, pointer_of
from deepep_cupy.jax.gpu_memory import GpuMemory
from deepep_cupy.jax.memory import HandleArrays, HostMemory, Memory
from deepep_cupy.jax.site import TARGET, Site

__all__ = ["Attached", "Attachment", "attach", "attached", "check"]

_PLATFORMS = ("cpu", "CUDA")
_TRAITS = {"cpu": 0, "CUDA": RECORDABLE}
_BACKENDS = {"host": "cpu", "cuda": "gpu"}
"""Engine → what JAX calls the backend whose arrays it takes."""
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ContractError, ErrorCode.INVALID_ARGUMENT),
    (PeerTimeoutError, ErrorCode.DEADLINE_EXCEEDED),
    (PeerAbortedError, ErrorCode.ABORTED),
    (StateError, ErrorCode.FAILED_PRECONDITION),
)

_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Attached] = weakref.WeakValueDictionary()
_of: weakref.WeakKeyDictionary[Buffer, Attached] = weakref.WeakKeyDictionary()
_handlers: dict[tuple[str, str], Any] = {}
"""(Operation, platform) → handler; kept for ever, as compiled programs call them."""


class Attachment(NamedTuple):
    """What ``attach`` returns.

    Attributes:
        platform: ``"cpu"`` or ``"CUDA"``, as XLA calls it.
        zero_copy: Whether rows go straight from and to XLA's memory. False: results are copied.
    """

    platform: str
    zero_copy: bool


@dataclass(eq=False)
class Attached:
    """A Buffer that compiled programs may use.

    Args:
        number: Its number among those of this process, by which programs name it.
        memory: XLA's memory, for its engine.
        buffer: Weak: a program must not keep a Buffer open.

    Attributes:
        error: What the newest failed call raised, until ``check`` raises it.
    """

    number: int
    memory: Memory
    buffer: weakref.ref[Buffer]

    def __post_init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, site: Site, frame: Frame) -> None:
        """Run one call of a compiled program."""
        buffer = self.buffer()
        if buffer is None:
            raise _gone(site)
        # XLA may run independent programs on several threads. Which comes first, the tokens (see
        # ``chain``) or the user's program decide; the lock only keeps two from meeting.
        with self._lock, self.memory.stream(frame):
            operands, results = frame.operands()[:-2], frame.results()[:-1]  # without tokens
            try:
                if site.operation == "combine":
                    _combine(buffer, self.memory, site, operands, results)
                else:
                    _dispatch(buffer, self.memory, site, operands, results)
            except BaseException as error:
                self.error = error
                raise


def _gone(site: Site) -> StateError:
    return StateError(
        f"{site.operation}() at {site.place}: the Buffer that this program was compiled for is "
        f"gone; keep it alive as long as the program runs."
    )


def attach(buffer: Buffer) -> Attachment:
    """Let programs compiled by JAX use a Buffer. A second call for it does nothing.

    A program keeps the number of the Buffer, in the order of these calls, not the Buffer: keep it
    alive and open as long as the program runs.

    Collective: no, but all ranks attach their Buffers in the same order.  Stream: none.
    Host sync: no.

    Args:
        buffer: An open Buffer. On the host engine JAX runs on CPUs, on the cuda engine on GPUs.

    Returns:
        The platform, and whether rows are copied between XLA's memory and the Buffer's.

    Raises:
        PlatformError: JAX runs on another platform than the engine, this process has more than one
            JAX device, or JAX or the MPI library is too old.
        StateError: The Buffer is closed.
    """
    found = _of.get(buffer)
    if found is None:
        _check_platform(buffer)
        memory = _memory_of(buffer)
        _register()
        number = next(_numbers)
        found = _of[buffer] = _known[number] = Attached(number, memory, weakref.ref(buffer))
    return Attachment(found.memory.platform, zero_copy=False)


def attached(buffer: Buffer, operation: str) -> Attached:
    """What ``attach`` made of a Buffer.

    Raises:
        StateError: It was not called.
    """
    found = _of.get(buffer)
    if found is None:
        raise StateError(
            f"{operation}(): this Buffer is not known to JAX; call deepep_cupy.jax.attach(buffer) "
            f"once, on every rank."
        )
    return found


def check(buffer: Buffer) -> None:
    """Raise what calls of compiled programs have left to be reported, as this package's errors.

    JAX shows what a call raised as its own error with the text of ours, and only when a result is
    waited for. This raises the error itself: call it after ``block_until_ready`` has failed, or
    now and then.

    Collective: no.  Stream: none.  Host sync: no.

    Raises:
        ContractError: A call was refused; the Buffer stays usable.
        StateError: The Buffer is closed, or poisoned by an earlier failure.
        PeerTimeoutError: A rank was late. The Buffer is poisoned.
        PeerAbortedError: Another rank gave up. The Buffer is poisoned.
    """
    found = attached(buffer, "check")
    error, found.error = found.error, None
    if error is not None:
        raise error
    buffer.check()


def _check_platform(buffer: Buffer) -> None:
    """Refuse a JAX that cannot work with this Buffer."""
    if not hasattr(jax, "ffi"):
        raise PlatformError(
            f"attach(): JAX {jax.__version__} has no jax.ffi; install jax>=0.10, or "
            f"'deepep_cupy[jax]'."
        )
    wanted, backend = _BACKENDS[buffer.engine_name], jax.default_backend()
    if wanted != backend:
        raise PlatformError(
            f"attach(): the Buffer runs on the {buffer.engine_name} engine, but JAX on "
            f"{backend!r}; set JAX_PLATFORMS={'cpu' if wanted == 'cpu' else 'cuda'}, or give the "
            f"Buffer engine={'host' if backend == 'cpu' else 'cuda'!r}."
        )
    devices = jax.local_devices()
    if len(devices) != 1:
        raise PlatformError(
            f"attach(): this process has {len(devices)} JAX devices, a rank must have one; set "
            f"CUDA_VISIBLE_DEVICES to one GPU for each rank (on CPUs "
            f"--xla_force_host_platform_device_count=1)."
        )
    if buffer.device is None:
        _check_threads()
    elif devices[0].local_hardware_id != buffer.device:
        raise PlatformError(
            f"attach(): the Buffer is on GPU {buffer.device}, but JAX on GPU "
            f"{devices[0].local_hardware_id}; give the Buffer device= that one."
        )


def _check_threads() -> None:
    """XLA runs calls on threads of its own."""
    from deepep_cupy.ranks.mpi import other_threads_may_call

    if not other_threads_may_call():
        raise PlatformError(
            "attach(): XLA calls MPI from its own threads, which needs MPI_THREAD_SERIALIZED, but "
            "this MPI was initialised with less; let mpi4py initialise it (its default is "
            "MPI_THREAD_MULTIPLE)."
        )


def _memory_of(buffer: Buffer) -> Memory:
    if buffer.device is None:
        return HostMemory()
    engine = buffer._engine
    assert isinstance(engine, CudaEngine)
    return GpuMemory(engine)


def _register() -> None:
    """Tell XLA of the targets, once for a process."""
    for operation in ("dispatch", "cached", "combine"):
        for platform in _PLATFORMS:
            if (operation, platform) in _handlers:
                continue
            handler = make_handler(_work_on(platform), _code_of, _TRAITS[platform])
            _handlers[operation, platform] = handler
            capsule = jax.ffi.pycapsule(pointer_of(handler))
            jax.ffi.register_ffi_target(TARGET.format(operation), capsule, platform=platform)


def _work_on(platform: str) -> Any:
    def work(frame: Frame) -> None:
        site = Site.of(frame.text())
        found = _known.get(site.buffer)
        if found is None:
            raise _gone(site)
        if found.memory.platform != platform:
            raise PlatformError(
                f"{site.operation}() at {site.place}: this program was compiled for {platform}, "
                f"but its Buffer's arrays lie on {found.memory.platform}."
            )
        found.run(site, frame)

    return work


def _code_of(error: BaseException) -> int:
    return next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL)


# -------------------------------------------------------------------------------- operations


def _handle_arrays(
    memory: Memory, buffer: Buffer, site: Site, given: list[int]
) -> tuple[HandleArrays, list[int]]:
    """A handle's arrays, and the operands behind them."""
    spec = buffer._spec
    length = num_words(site.num_tokens, spec.num_ranks, spec.num_local_experts)
    words, *given = given
    table = sent = None
    if site.expanded:
        row, choices, *given = given
        table = memory.array(row, (site.capacity, site.num_topk), "int32")
        sent = memory.array(choices, (site.num_tokens, site.num_topk), site.index_dtype)
    return HandleArrays(memory.array(words, (length,), "int32"), table, sent), given


def _dispatch(
    buffer: Buffer, memory: Memory, site: Site, operands: list[int], results: list[int]
) -> None:
    """Operands: x, topk_idx or the handle's arrays, topk_weights. Results: see ``calls``."""
    tokens, topk, first = site.num_tokens, site.num_topk, operands[0]
    x = memory.array(first, (tokens, site.hidden), site.dtype)
    operands, handle, topk_idx, weights = operands[1:], None, None, None
    if site.operation == "cached":
        arrays, operands = _handle_arrays(memory, buffer, site, operands)
        routing = memory.routing(site, buffer._spec, arrays)
        handle = buffer._handle_over(routing, topk)
    else:
        topk_idx = memory.array(operands[0], (tokens, topk), site.index_dtype)
        operands = operands[1:]
    if site.weights:
        weights = memory.array(operands[0], (tokens, topk), "float32")
    done = buffer.dispatch(
        x,
        handle=handle,
        topk_idx=topk_idx,
        topk_weights=weights,
        num_worst_tokens=0 if handle is not None else site.capacity,
        expert_alignment=1 if handle is not None else site.alignment,
        do_expand=site.expanded,
        do_zero_padding=site.expanded,
        quantize=site.quantize,
        tag=site.tag,
    )
    routing = done.handle.routing
    ends = routing.psum_expert_rows if site.expanded else routing.psum_recv_rows
    rows = done.recv_x if isinstance(done.recv_x, tuple) else (done.recv_x,)
    for array in rows:
        _put_rows(memory, array, results, ends)
    if handle is None and not site.expanded:
        _put(memory, done.recv_topk_idx, results)
    if done.recv_topk_weights is not None:
        _put_rows(memory, done.recv_topk_weights, results, ends)
    if handle is not None:
        return
    length = num_words(tokens, buffer.num_ranks, buffer._spec.num_local_experts)
    memory.words(routing, memory.array(results.pop(0), (length,), "int32"))
    _put(memory, routing.recv_src_idx, results)
    if site.expanded:
        _put(memory, routing.expanded_row, results)


def _put(memory: Memory, source: Array, results: list[int]) -> None:
    """Copy an array to the next result."""
    memory.put(memory.array(results.pop(0), source.shape, source.dtype.name), source)


def _put_rows(memory: Memory, source: Array, results: list[int], ends: Array) -> None:
    """Copy the real rows of an array to the next result, and zero the others."""
    to = memory.array(results.pop(0), source.shape, source.dtype.name)
    memory.put_rows(to, source, ends)


def _combine(
    buffer: Buffer, memory: Memory, site: Site, operands: list[int], results: list[int]
) -> None:
    """Operands: y, the handle's arrays, topk_weights, biases. Results: see ``calls``."""
    tokens, topk, first = site.num_tokens, site.num_topk, operands[0]
    y = memory.array(first, (site.num_rows, site.hidden), site.dtype)
    arrays, operands = _handle_arrays(memory, buffer, site, operands[1:])
    handle = buffer._handle_over(memory.routing(site, buffer._spec, arrays), topk)
    weights = None
    if site.weights:
        shape = (site.num_rows,) if site.expanded else (site.num_rows, topk)
        weights = memory.array(operands[0], shape, "float32")
        operands = operands[1:]
    rows = (tokens, site.hidden)
    biases = [memory.array(each, rows, site.dtype) for each in operands]
    done = buffer.combine(
        y,
        handle,
        topk_weights=weights,
        bias=tuple(biases) or None,
        out=memory.array(results[0], rows, site.dtype),
        reduce=site.reduce,
        tag=site.tag,
    )
    if weights is not None:
        to = memory.array(results[1], (tokens, topk), "float32")
        memory.put(to, done.combined_topk_weights)
