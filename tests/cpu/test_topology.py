"""What the ranks learn of their GPUs, and what they make of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from deepep_cupy.engines.gpu import topology
from deepep_cupy.engines.gpu.topology import Gpu, Topology, survey


def gpu(rank, uuid, **changes):
    facts = {
        "rank": rank,
        "host": "node0",
        "device": 0,
        "uuid": uuid,
        "name": "H200",
        "num_sms": 132,
        "capability": (9, 0),
        **changes,
    }
    return Gpu(**facts)


class Group:
    """One rank that hears what the test lets the others say."""

    def __init__(self, rank=0, others=()):
        self.rank, self.size, self.host, self.others = rank, 1 + len(others), "node0", others

    def allgather(self, value):
        return sorted([value, *self.others], key=lambda each: each.rank)


class Runtime:
    """Three GPUs; 0 and 2 cannot reach each other."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, count=3, capability=(9, 0)):
        self.count, self.capability = count, capability

    def getDeviceCount(self):
        if self.count < 0:
            raise self.CUDARuntimeError("cudaErrorInsufficientDriver")
        return self.count

    def getDeviceProperties(self, device):
        major, minor = self.capability
        return {
            "name": b"H200",
            "major": major,
            "minor": minor,
            "multiProcessorCount": 132,
            "totalGlobalMem": 141 << 30,
        }

    def deviceGetAttribute(self, attribute, device):
        raise self.CUDARuntimeError("cudaErrorInvalidValue")

    def deviceCanAccessPeer(self, device, peer):
        return int({device, peer} != {0, 2})


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(topology, "_DRIVER", None)  # this process: a library that is there
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime()))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=None))
    monkeypatch.setattr(topology, "device_uuid", lambda device: f"GPU-{device:08}-more")

    def change(**options):
        cupy.cuda.runtime = Runtime(**options)

    return change


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(("local_rank", "device"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 1)])
def test_the_default_device_is_the_local_rank_modulo_the_visible_gpus(local_rank, device):
    (found,) = survey(Group(), local_rank=local_rank).gpus
    assert found.device == device
    assert found.uuid == f"GPU-{device:08}-more"
    assert (found.name, found.num_sms, found.total_bytes) == ("H200", 132, 141 << 30)
    assert not found.mps
    assert found.objection == ""
    assert survey(Group(rank=local_rank)).gpus[0].device == device


@pytest.mark.usefixtures("runtime")
def test_a_device_can_be_chosen():
    assert survey(Group(), 2).gpus[0].device == 2
    assert "device=3 does not exist, 3 are visible" in survey(Group(), 3).verdict()
    assert "device=-1 does not exist" in survey(Group(), -1).verdict()


def test_reasons_not_to_run(runtime):
    runtime(count=0)
    assert survey(Group()).verdict() == ("rank 0: no GPU is visible (see CUDA_VISIBLE_DEVICES)")
    runtime(count=-1)
    assert "driver" in survey(Group()).verdict()
    runtime(capability=(7, 5))
    assert survey(Group()).verdict() == (
        "rank 0: its GPU has compute capability 7.5, and 8.0 is the least"
    )


def test_no_cupy(monkeypatch):
    monkeypatch.setattr(topology, "_DRIVER", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "install deepep_cupy[cuda13]" in survey(Group()).verdict()


def test_no_driver_is_said_at_once(monkeypatch):
    monkeypatch.setattr(topology, "_DRIVER", "libnot_there.so.1")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert survey(Group()).verdict().startswith("rank 0: no NVIDIA driver (libnot_there.so.1: ")


def test_what_nobody_expected_is_an_objection_too(monkeypatch):
    monkeypatch.setattr(topology, "_look", lambda *arguments: 1 / 0)
    assert survey(Group()).verdict() == "rank 0: ZeroDivisionError: division by zero"


@pytest.mark.usefixtures("runtime")
def test_a_pair_without_peer_access_is_named_by_the_rank_that_sees_both():
    peer = gpu(1, "GPU-00000002-more")
    text = survey(Group(others=(peer,))).verdict()
    assert text.startswith("rank 0: its GPU GPU-00000000 has no peer access to GPU GPU-00000002")
    assert "of rank 1" in text
    # A GPU that nobody uses does not matter.
    assert survey(Group(others=(gpu(1, "GPU-00000001-more"),))).verdict() == ""


def test_ranks_that_share_gpus():
    ranks = Topology(tuple(gpu(rank, f"GPU-{rank % 2:08}", mps=True) for rank in range(5)))
    assert ranks.num_gpus == 2
    assert ranks.sharing(3) == (1, 3)
    assert ranks.sharing(0) == (0, 2, 4)
    assert ranks.max_ranks_per_gpu == 3
    assert ranks.mps
    assert ranks.summary() == (
        "ranks 0, 2, 4 on H200 GPU-00000000 under MPS; ranks 1, 3 on H200 GPU-00000001 under MPS"
    )
    alone = Topology((gpu(0, "GPU-a"),))
    assert alone.summary() == "rank 0 on H200 GPU-a"
    assert not alone.mps
    assert alone.verdict() == ""


def test_every_rank_with_a_reason_is_named():
    ranks = Topology((gpu(0, "a"), Gpu(1, "node0", objection="x"), Gpu(2, "node0", objection="y")))
    assert ranks.objections() == [(1, "x"), (2, "y")]
    assert ranks.verdict() == "rank 1: x; rank 2: y"
