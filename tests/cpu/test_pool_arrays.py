"""CuPy arrays over the pool, without a GPU: pointers, lifetimes, and what CUDA's errors become."""

from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.memory import cuda_ipc
from deepep_cupy.memory.cuda_ipc import CudaMemory, CupyEvents, PoolArrays
from deepep_cupy.memory.pool import Pool
from deepep_cupy.memory.region import MemoryCallError
from deepep_cupy.memory.stream_clock import JOINED

ml_dtypes = pytest.importorskip("ml_dtypes")
BASE = 0x7F0000000000


class NoEvents:
    def capture_id(self, stream):
        return 0


@pytest.fixture
def arrays():
    pytest.importorskip("cupy")
    pool = Pool(1 << 20, NoEvents(), start=4096)
    region = SimpleNamespace(
        base=BASE,
        allocation=object(),
        find=lambda address, nbytes: address - BASE if 0 <= address - BASE < 2 << 20 else None,
    )
    return PoolArrays(region, pool, 0)


def test_arrays_lie_where_their_block_lies(arrays):
    pool = arrays._pool
    block = pool.alloc(4096, "s")
    pointer = arrays.own(block)
    x = arrays.array(pointer, (4, 8), np.float32)
    y = arrays.array(pointer, (3,), ml_dtypes.float8_e4m3fn, offset=2048)
    z = arrays.array(pointer, (0, 7168), ml_dtypes.bfloat16, offset=4096)
    assert x.data.ptr == BASE + block.offset
    assert y.data.ptr == BASE + block.offset + 2048
    assert (x.shape, y.dtype, z.size) == ((4, 8), ml_dtypes.float8_e4m3fn, 0)
    assert x.data.device_id == 0
    assert arrays.find(x) == block.offset
    assert arrays.find(x[1:]) == block.offset + 32


def test_the_last_array_of_a_block_gives_it_back(arrays):
    pool = arrays._pool
    pointer = arrays.own(pool.alloc(4096, "s"))
    x = arrays.array(pointer, (4, 8), np.float32)
    y = arrays.array(pointer, (3,), np.int64, offset=2048)
    del pointer
    view = x.reshape(-1)[5:]
    del x, y
    assert pool.statistics().num_blocks == 1
    del view
    assert pool.statistics().num_blocks == 0


def test_empty_and_record_stream(arrays):
    x = arrays.empty((4, 8), ml_dtypes.bfloat16, "s", "y")
    (block,) = arrays._pool.live()
    assert (block.label, block.nbytes) == ("y", 512)
    assert arrays.record_stream(x[2:], "side")
    assert list(block.uses) == ["side"]
    outside = SimpleNamespace(data=SimpleNamespace(ptr=12), nbytes=4)
    assert not arrays.record_stream(outside, "side")


# ---------------------------------------------------------------------- CUDA's answers, made up


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cuda error {status}")
        self.status = status


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    status = 0
    peers = True

    def __getattr__(self, name):
        return self._answer

    def _answer(self, *arguments):
        if self.status:
            raise CUDARuntimeError(self.status)
        return 4096

    def memGetInfo(self):
        return 3 << 20, 9 << 20

    def getDeviceCount(self):
        return 2

    def deviceCanAccessPeer(self, device, peer):
        assert device != peer
        return int(self.peers)

    def eventQuery(self, event):
        return self.status


class Device:
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class Event:
    made = 0
    ptr = 7

    def __init__(self, disable_timing):
        assert disable_timing
        Event.made += 1

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    cuda = SimpleNamespace(runtime=runtime, Device=Device, Event=Event)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: f"GPU-{device}")
    return runtime


def test_calls_that_succeed(runtime):
    memory = CudaMemory(0)
    uuid, container = memory.identity()
    assert uuid == "GPU-0"
    assert "ipc" in container
    assert "pid" in container
    assert memory.allocate(1 << 20) == memory.open(bytes(64), "GPU-1") == 4096
    assert memory.open(bytes(64), "GPU-0") == 4096  # another process on this GPU
    assert memory.open(bytes(64), "GPU-elsewhere") == 4096  # a GPU this process does not see
    memory.zero(4096, 10)
    memory.close(4096)
    memory.free(4096)
    memory.synchronize()


@pytest.mark.parametrize(
    ("call", "status", "why", "text"),
    [
        (lambda memory: memory.allocate(5 << 20), 2, "memory", "5 MiB, of 9 MiB 3 MiB are free"),
        (lambda memory: memory.allocate(5 << 20), 719, "refused", "cuda error 719"),
        (lambda memory: memory.zero(1, 1), 719, "refused", "cuda error 719"),
        (lambda memory: memory.export(1), 801, "refused", "cudaIpcGetMemHandle"),
        (lambda memory: memory.open(bytes(64), "GPU-1"), 201, "refused", "cudaIpcOpenMemHandle"),
        (lambda memory: memory.open(bytes(64), "GPU-1"), 217, "peer access", "error 217"),
    ],
)
def test_calls_that_fail(runtime, call, status, why, text):
    runtime.status = status
    with pytest.raises(MemoryCallError, match=text) as caught:
        call(CudaMemory(0))
    assert caught.value.why == why


def test_peer_access_is_asked_before_it_is_tried(runtime):
    runtime.peers = False
    memory = CudaMemory(0)
    with pytest.raises(MemoryCallError) as caught:
        memory.open(bytes(64), "GPU-1")
    assert caught.value.why == "peer access"
    assert memory.open(bytes(64), "GPU-0") == 4096


def test_events_are_used_again(runtime):
    events = CupyEvents()
    made = Event.made
    waited = []
    stream = SimpleNamespace(wait_event=waited.append, ptr=0)
    for _ in range(5):
        event = events.record(stream)
        events.wait(stream, event)
        del event
    assert Event.made == made + 1
    assert len(waited) == 5


def test_an_event_query_tells_faults_from_work(runtime):
    events = CupyEvents()
    event = events.record(None)
    assert events.query(event)
    runtime.status = 600
    assert not events.query(event)
    runtime.status = 719
    with pytest.raises(CUDARuntimeError):
        events.query(event)


def test_an_event_in_a_reference_cycle_is_not_used_again_when_it_is_destroyed():
    """The collector of garbage calls the finalizers of a cycle in any order."""
    destroyed = []

    class Event:
        def __init__(self, disable_timing):
            pass

        def record(self, stream):
            assert id(self) not in destroyed

        def __del__(self):
            destroyed.append(id(self))

    events = CupyEvents()
    events._new = Event
    cycle = [events.record(None)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not destroyed
    events.record(None)
    assert len(events._made) == 1


def test_capture_id(runtime, monkeypatch):
    events = CupyEvents()
    stream = SimpleNamespace(ptr=5)
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuStreamGetCaptureInfo=lambda pointer: (0, 1, 42, None, None, 0),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    assert events.capture_id(stream) == 42
    with events.joined():
        assert events.capture_id(stream) == JOINED
        other = threading.Thread(target=lambda: others.append(events.capture_id(stream)))
        others = []
        other.start()
        other.join()
    assert others == [events.capture_id(stream)] == [42]
    runtime.status = 906
    assert events.capture_id(stream) == -1
    runtime.status = 719
    with pytest.raises(CUDARuntimeError):
        events.capture_id(stream)
    monkeypatch.setattr(runtime, "streamIsCapturing", lambda pointer: False, raising=False)
    assert events.capture_id(stream) == 0
