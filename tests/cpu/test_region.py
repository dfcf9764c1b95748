"""The symmetric region: agreement, order of closing, messages. Ranks are threads here."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepep_cupy.errors import PlatformError
from deepep_cupy.memory.region import GRANULE, MemoryCallError, RegionError, SymmetricRegion


class Node:
    """What the fake devices share."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.values = [None] * size
        self.lock = threading.Lock()
        self.log = []
        self.opened = {}
        self.freed = set()

    def note(self, *what):
        with self.lock:
            self.log.append(what)


class ThreadGroup:
    """As much of ``Group`` as the region uses."""

    def __init__(self, node, rank, host="node0"):
        self.node, self.rank, self.size, self.host = node, rank, node.size, host

    def allgather(self, value):
        self.node.values[self.rank] = value
        self.node.barrier.wait()
        values = list(self.node.values)
        self.node.barrier.wait()
        return values


class FakeMemory:
    """Device memory that fails where it is told to."""

    def __init__(self, node, rank, *, fail=None, container="here", uuid=None):
        self.node, self.rank = node, rank
        self.fail = fail or {}
        self.container = container
        self.uuid = uuid or f"gpu{rank}"
        self.zeroed = False

    def identity(self):
        self._maybe_fail("identity")
        return self.uuid, self.container

    def allocate(self, nbytes):
        self._maybe_fail("allocate")
        assert nbytes % GRANULE == 0
        self.node.note("allocate", self.rank)
        return 1000 * GRANULE * (self.rank + 1)

    def zero(self, address, nbytes):
        self.node.note("zero", self.rank, nbytes)

    def export(self, address):
        self._maybe_fail("export")
        return b"handle%d" % self.rank

    def open(self, handle, uuid):
        peer = int(handle[6:])
        assert peer != self.rank, "a process cannot open its own handle"
        assert uuid.startswith("gpu")
        self._maybe_fail(("open", peer))
        with self.node.lock:
            assert peer not in self.node.freed
            assert ("zero", peer, 4096) in self.node.log
            self.node.opened[self.rank, peer] = True
        return 1000 * GRANULE * (peer + 1) + GRANULE * 100 * (self.rank + 1)

    def close(self, address):
        peer = address // (1000 * GRANULE) - 1
        with self.node.lock:
            del self.node.opened[self.rank, peer]
            self.node.log.append(("close", self.rank, peer))

    def free(self, address):
        with self.node.lock:
            users = [pair for pair in self.node.opened if pair[1] == self.rank]
            assert not users, f"freed while mapped: {users}"
            self.node.freed.add(self.rank)
            self.node.log.append(("free", self.rank))

    def synchronize(self):
        self.node.note("synchronize", self.rank)

    def _maybe_fail(self, what):
        if what in self.fail:
            raise self.fail[what]


def on_all_ranks(node, function):
    """Call ``function(rank)`` on every rank; results, or the errors raised."""

    def call(rank):
        try:
            return function(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(node.size) as executor:
        return list(executor.map(call, range(node.size)))


def open_all(node, hosts=None, **options):
    """Make regions; ``options`` maps rank → keyword arguments of its FakeMemory."""

    def make(rank):
        memory = FakeMemory(node, rank, **options.get(f"rank{rank}", {}))
        group = ThreadGroup(node, rank, (hosts or {}).get(rank, "node0"))
        return SymmetricRegion(group, memory, 3 * GRANULE - 5, zero_bytes=4096)

    return on_all_ranks(node, make)


def one_error(results):
    """All ranks raised the same."""
    assert all(isinstance(each, RegionError) for each in results), results
    assert len({str(each) for each in results}) == 1
    assert len({each.out_of_memory for each in results}) == 1
    assert isinstance(results[0], PlatformError)
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_regions_are_opened_used_and_closed_in_order(size):
    node = Node(size)
    regions = open_all(node)
    for rank, region in enumerate(regions):
        assert region.nbytes == 3 * GRANULE
        assert region.peer_base[rank] == region.base
        assert len(set(region.peer_base)) == size
        assert region.peer_nbytes == [3 * GRANULE] * size
    assert len(node.opened) == size * (size - 1)

    keeps = [regions[0].allocation]
    on_all_ranks(node, lambda rank: regions[rank].close(node.barrier.wait))
    assert node.opened == {}
    assert node.freed == set(range(1, size))
    keeps.clear()  # the last array dies
    assert node.freed == set(range(size))
    closes = [at for at, what in enumerate(node.log) if what[0] == "close"]
    frees = [at for at, what in enumerate(node.log) if what[0] == "free"]
    synchronized = [at for at, what in enumerate(node.log) if what[0] == "synchronize"]
    if size > 1:
        assert max(synchronized) < min(closes)
        assert max(closes) < min(frees)
    on_all_ranks(node, lambda rank: regions[rank].close(node.barrier.wait))
    assert len(node.log) == max(frees) + 1


def test_find():
    (region,) = open_all(Node(1))
    end = region.base + region.nbytes
    assert region.find(region.base, region.nbytes) == 0
    assert region.find(region.base + 100, 0) == 100
    assert region.find(region.base - 1, 10) is None
    assert region.find(end - 10, 11) is None
    assert region.find(end - 10, 10) == region.nbytes - 10


def test_a_barrier_that_fails_leaves_everything_to_the_process_end():
    node = Node(2)
    regions = open_all(node)

    def late():
        raise TimeoutError("rank 1 is late")

    for region in regions:
        with pytest.raises(TimeoutError):
            region.close(late)
    regions.clear()
    gc.collect()
    assert node.freed == set()
    assert len(node.opened) == 2


def test_leave_frees_nothing():
    node = Node(2)
    regions = open_all(node)
    for region in regions:
        region.leave()
        region.close(pytest.fail)
    regions.clear()
    gc.collect()
    assert node.freed == set()


def test_too_little_memory_on_one_rank_raises_on_all():
    node = Node(4)
    short = MemoryCallError("memory", "wanted 4096 MiB, of 143771 MiB 812 MiB are free")
    error = one_error(open_all(node, rank2={"fail": {"allocate": short}}))
    assert error.out_of_memory
    for part in ("rank 2 on GPU gpu2 of node0", "4096 MiB", "812 MiB are free", "pool_bytes"):
        assert part in str(error)
    assert node.freed == {0, 1, 3}


def test_no_peer_access_names_the_pair():
    node = Node(3)
    denied = MemoryCallError("peer access", "cudaDeviceCanAccessPeer says no")
    error = one_error(
        open_all(node, rank0={"fail": {("open", 2): denied}}, rank2={"fail": {("open", 0): denied}})
    )
    assert not error.out_of_memory
    for part in ("GPU gpu0 of rank 0", "GPU gpu2 of rank 2", "0→2, 2→0", "NVLink", "engine='host'"):
        assert part in str(error)
    assert node.freed == {0, 1, 2}
    assert node.opened == {}


@pytest.mark.parametrize(
    ("container", "advice"), [("there", "different containers"), ("here", "CUDA IPC was refused")]
)
def test_ipc_refused_says_what_to_do(container, advice):
    node = Node(2)
    refused = MemoryCallError("refused", "cudaIpcOpenMemHandle: invalid device context")
    error = one_error(
        open_all(node, rank1={"fail": {("open", 0): refused}, "container": container})
    )
    for part in ("rank 1 cannot open the memory of rank 0", advice, "--ipc=host"):
        assert part in str(error)
    assert node.freed == {0, 1}


@pytest.mark.parametrize("where", ["identity", "export", ("open", 0)])
def test_a_failure_of_any_kind_is_heard_by_all(where):
    node = Node(2)
    error = one_error(open_all(node, rank1={"fail": {where: ValueError("something new")}}))
    assert "something new" in str(error)
    assert node.opened == {}


def test_several_nodes_are_refused():
    node = Node(3)
    error = one_error(open_all(node, hosts={2: "node1"}))
    assert "node0, node1" in str(error)
    assert node.freed == {0, 1, 2}
