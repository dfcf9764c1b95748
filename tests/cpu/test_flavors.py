"""Copies as launched, on simulated GPUs; the report of ``bench flavors``."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import threading
import types

import numpy as np
import pytest

from deepep_cupy.bench import command as bench
from deepep_cupy.bench import flavors
from deepep_cupy.bench import flavors_command as bench_flavors
from deepep_cupy.bench.flavors import CLASSES, FLAVORS, SHARED_BYTES, Copies
from deepep_cupy.bench.flavors_command import Pair, Point, Results
from deepep_cupy.cli import main
from deepep_cupy.jit.compile import Loaded
from simulator.gpus import Gpus
from simulator.ptx import ptx_kernel

AREA = 4096  # one chunk a copy
SIZE = 0x10000
STAGES_BYTES = 4 * 3584


class FakeGpu:
    """CuPy, the driver and IPC on simulated GPUs; launches run at once."""

    def __init__(self, monkeypatch, size=1, num_threads=64):
        self.gpus = Gpus(size, nbytes=SIZE, num_threads=num_threads, max_blocks=32 // size)
        self.size, self.num_threads, self.lock = size, num_threads, threading.RLock()
        self.programs, self.launched, self.clock = [], [], 0.0
        self.flushed = lambda: None
        stream = types.SimpleNamespace(ptr=0, synchronize=lambda: None)
        gpu = self

        class Event:
            def record(self, stream):
                gpu.clock += 0.5
                self.at = gpu.clock

        cuda = types.SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda a, b: b.at - a.at,
            UnownedMemory=lambda ptr, size, owner, device: ptr,
            MemoryPointer=lambda memory, offset: memory + offset,
        )
        cupy = types.SimpleNamespace(
            cuda=cuda,
            uint8=np.uint8,
            arange=np.arange,
            ndarray=lambda shape, dtype, memptr: self.view(memptr, shape[0]).view(dtype),
            empty=lambda nbytes, dtype: types.SimpleNamespace(
                data=types.SimpleNamespace(memset_async=lambda *_: gpu.flushed()), nbytes=nbytes
            ),
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(flavors, "load_entry", self.load)
        monkeypatch.setattr(flavors, "open_region", self.open_region)

    def base(self, rank=0):
        return self.gpus.base(rank, rank)

    def view(self, address, nbytes):
        return self.gpus.view(address, nbytes)

    def load(self, module, name):
        self.programs.append((name, module))
        return Loaded(name, len(self.programs) - 1, ()), module.entry(name)

    def open_region(self, group, device, nbytes):
        assert nbytes >= 3 * AREA
        bases = [self.gpus.base(group.rank, owner) for owner in range(group.size)]
        return types.SimpleNamespace(
            base=bases[group.rank], peer_base=bases, allocation=None, close=lambda meet: meet()
        )

    # The driver that launches use.
    def prepare(self, function, grid, threads, shared_bytes, params):
        name, module = self.programs[function]
        entry, kernel = module.entry(name), ptx_kernel(module.name)
        pointers = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))

        def call(stream):
            packed = bytearray(64)
            for number, (param, offset) in enumerate(kernel.params.items()):
                nbytes = entry.layout({}).fields[param].nbytes
                packed[offset : offset + nbytes] = ctypes.string_at(pointers[number], nbytes)
            with self.lock:
                self.launched.append((name, grid, threads, shared_bytes))
                rank = int.from_bytes(packed[:8], "little") >> 40 & 15  # whose address `to` is
                dynamic = self.num_threads // 32 * STAGES_BYTES if shared_bytes else 0
                how = {"dynamic": dynamic}
                self.gpus.launch(rank, 0, module.name, grid, self.num_threads, bytes(packed), **how)
                self.gpus.run()
                assert not self.gpus.faults, self.gpus.faults[0].text

        return call

    def allow_shared(self, function, nbytes):
        assert nbytes == SHARED_BYTES

    def blocks_per_sm(self, function, threads, shared_bytes):
        return 4

    def num_sms(self):
        return 8


def group_of(rank=0, size=1, allgather=lambda value: [value]):
    return types.SimpleNamespace(rank=rank, size=size, allgather=allgather)


def make(gpu, group, barrier=lambda: None):
    return Copies(group, 0, AREA - 100, barrier, driver=gpu)


@pytest.mark.sim
@pytest.mark.parametrize("flavor", FLAVORS, ids=lambda flavor: flavor.name)
def test_one_rank_copies_to_itself(flavor, monkeypatch):
    gpu = FakeGpu(monkeypatch)
    copies = make(gpu, group_of())
    assert copies.nbytes == AREA
    before = ptx_kernel("copy_flavors_bulk").hints()
    for kind in CLASSES:
        assert copies.check(kind, flavor, 2), kind
    if flavor.bulk:
        assert ("copy_flavor_bulk", 2, 512, SHARED_BYTES) in gpu.launched
        codes = {"none": 0, "evict_first": 1, "evict_normal": 2}
        after = ptx_kernel("copy_flavors_bulk").hints()
        hints = [codes[flavor.load_hint], codes[flavor.store_hint]]
        for new, old, wanted in zip(after, before, hints, strict=True):
            assert [hint for hint in range(3) if new[hint] > old[hint]] == [wanted]
    else:
        assert ("copy_flavor", 2, 512, 0) in gpu.launched


@pytest.mark.sim
def test_two_ranks_copy_to_and_from_each_other(monkeypatch):
    gpu = FakeGpu(monkeypatch, size=2)
    meeting, told = threading.Barrier(2, timeout=60), [None, None]
    results = [None, None]

    def rank_main(rank):
        def allgather(value):
            told[rank] = value
            meeting.wait()
            everything = list(told)
            meeting.wait()
            return everything

        copies = make(gpu, group_of(rank, 2, allgather), barrier=meeting.wait)
        results[rank] = [copies.check(kind, FLAVORS[0], 2) for kind in CLASSES]
        copies.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[True] * 3] * 2
    # Pushed: what arrived here is the other's; pulled: the same.
    for rank in range(2):
        own = gpu.view(gpu.base(rank), AREA)
        other = [gpu.view(gpu.base(1 - rank) + n * AREA, AREA) for n in range(3)]
        assert (own != other[0]).any()
        assert (other[1] == own).all()
        assert (other[2] == own).all()


@pytest.mark.sim
def test_a_wrong_copy_is_told(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    copies = make(gpu, group_of())
    assert copies.check("push", FLAVORS[0], 2)
    gpu.view(gpu.base() + 2 * AREA - 1, 1)[0] ^= 1  # in what has arrived
    assert not copies.check("staged", FLAVORS[0], 2)
    assert copies.check("pull", FLAVORS[0], 2)
    gpu.view(gpu.base() + 3 * AREA, 1)[0] = 1  # a bulk load took too long
    assert not copies.check("pull", FLAVORS[0], 2)


@pytest.mark.sim
def test_each_timed_copy_begins_with_a_flush_and_a_barrier(monkeypatch):
    gpu, order = FakeGpu(monkeypatch), []
    copies = make(gpu, group_of(), lambda: order.append("barrier"))
    gpu.flushed = lambda: order.append("flush")
    order.clear()
    us = copies.measure("pull", FLAVORS[0], 3, repeats=4)
    assert us == 500.0
    assert order == ["flush", "barrier"] * 7
    assert gpu.launched == [("copy_flavor", 3, 512, 0)] * 7


def test_whole_operations_are_timed_in_turns(monkeypatch):
    """On the host engine, one rank: the calls, the order, and the comparison of results."""
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    import deepep_cupy
    from deepep_cupy import env
    from deepep_cupy.bench.timing import BUSY_FLUSHES, HostTimer

    made, order = [], []
    real = deepep_cupy.Buffer

    def buffer(comm, **arguments):
        made.append((env.loads(), env.path(), arguments["num_sms"]))
        return real(comm, **{**arguments, "engine": "host"})

    monkeypatch.setattr(deepep_cupy, "Buffer", buffer)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=np.asarray))

    class Timer(HostTimer):
        def __init__(self, flushes):
            assert flushes == BUSY_FLUSHES

        def measure(self, call, **options):
            order.append(options["barrier"].__self__)
            return super().measure(call, **options)

    monkeypatch.setattr(flavors, "CudaTimer", Timer)
    sizes = {"tokens": 5, "hidden": 32, "num_sms": 4}
    whole = flavors.Whole(mpi.COMM_WORLD, path="ldst", allgather=lambda value: [value], **sizes)
    assert made == [("coherent", "ldst", 4), ("nc", "ldst", 4)]
    assert whole.same_results()
    for operation in bench_flavors._OPERATIONS:
        times = whole.measure(operation, 4)
        assert set(times) == {"coherent", "nc"}
        assert min(times.values()) > 0
    assert order == [whole.buffers["coherent"], whole.buffers["nc"]] * 2 * 3
    whole._y["nc"].view("u1")[0, 0] ^= 1
    assert not whole.same_results()
    whole.close()


# --------------------------------------------------------------------------------------- report


def results(saved=10.0, sms=(8, 16), pairs=True):
    def us(flavor):
        return 100.0 * (1 - saved / 100) if flavor.name == bench_flavors._FAST else 100.0

    points = [
        Point(kind, flavor.name, number, us(flavor), 5.0 if "volatile" in flavor.name else 10.0)
        for kind in CLASSES
        for flavor in FLAVORS
        for number in sms
    ]
    whole = [Pair("ldst", operation, 16, 200.0, 190.0) for operation in bench_flavors._OPERATIONS]
    return Results("Test GPU", 2, 117_440_512, 4096, 7168, points, whole if pairs else [], [])


def test_the_report_answers_the_claim():
    said = bench_flavors._report(results())
    assert '"30 % lower latency": reached in 0 of 6 cases; the most is 10.0 %' in said
    assert "push: own rows, stored to the next rank" in said
    assert "117 MB a rank, GB/s" in said
    row = next(line for line in said.splitlines() if "dispatch with a handle" in line)
    assert row.split()[-5:] == ["16", "200.0", "190.0", "+5.0", "%"]
    assert "reached in 6 of 6 cases" in bench_flavors._report(results(saved=30.0))
    assert "-5.0 %" in bench_flavors._report(results(saved=-5.0))


def test_the_report_of_one_part_alone():
    assert "whole operations" not in bench_flavors._report(results(pairs=False))
    said = bench_flavors._report(results(sms=()))
    assert "lower latency" not in said
    assert "whole operations" in said


def test_what_is_wrong_is_in_the_report():
    said = bench_flavors._report(dataclasses.replace(results(), wrong=["push with x: wrong bytes"]))
    assert said.endswith("WRONG: push with x: wrong bytes")


@pytest.mark.parametrize(("sms", "pairs"), [((8, 16), True), ((8,), False), ((), True)])
def test_the_plot_is_drawn(sms, pairs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    drawn = []
    figure = bench_flavors.new_figure
    monkeypatch.setattr(
        bench_flavors, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[0]
    )
    bench_flavors._plot(results(sms=sms, pairs=pairs), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    copies = drawn[0].axes[: len(CLASSES) * bool(sms)]
    for axes in copies:  # per cent against ld, and few curves
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines) == ["ld", *(name for name, *_ in bench_flavors._CURVES.values())]
        assert set(lines["nc"].get_ydata()) == {0.0}
        assert lines["ld.volatile"].get_ydata()[0] == pytest.approx(-50.0)


def test_results_are_json():
    stored = json.loads(json.dumps(results().as_json()))
    assert stored["points"][0]["kind"] == "push"
    assert stored["pairs"][0]["nc_us"] == 190.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sms", "8,x"], "argument --sms must be numbers"),
        (["--sms", "0"], "argument --sms must be numbers"),
        (["--rows", "0"], "argument --rows must be at least 1"),
        (["--row-bytes", "-1"], "argument --row-bytes must be at least 1"),
        (["--row-bytes", "8"], "argument --row-bytes must be a multiple of 16, got 8"),
        (["--rows", "99999999999"], "--rows must be at least 1 and at most 16777216"),
        (["--json", "/nowhere/x.json"], "--json must name a file in a folder that exists"),
        (["--plot", "x.foo"], "--plot must end with .png or .pdf or .svg, got x.foo"),
    ],
)
def test_bad_arguments(arguments, said, monkeypatch, capsys):
    monkeypatch.setitem(main.COMMANDS, "bench", "")
    assert main.main(["bench", "flavors", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_the_dispatcher_hands_on_the_exit_code(monkeypatch):
    monkeypatch.setitem(main.COMMANDS, "bench", "")
    fake = types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: 7)
    monkeypatch.setitem(bench._VERBS, "flavors", (fake, ""))
    assert main.main(["bench", "flavors"]) == 7
