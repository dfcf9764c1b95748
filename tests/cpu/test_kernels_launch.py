"""Packing, its checks, the occupancy check, and the call into the driver (a stub of it)."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_cupy.engines.gpu import launch as launches
from deepep_cupy.engines.gpu.kernels import list_kernels, shape_constants
from deepep_cupy.errors import CompileError, ContractError, PlatformError
from deepep_cupy.jit.compile import Loaded, load
from deepep_cupy.jit.launch import Launch, Packed
from deepep_cupy.jit.spec import KernelSpec, Param, Struct

ROOT = Path(__file__).resolve().parents[2]
COMM = Struct("Comm", (Param("peer", "u8*", "kNumRanks"), Param("serial", "u32")))
SPEC = KernelSpec(
    name="probe",
    source="probe.cu",
    entry="probe",
    doc="",
    threads=64,
    shared_bytes="kSharedBytes",
    params=(
        Param("comm", COMM),
        Param("x", "const u8*"),
        Param("rows", "i32"),
        Param("tiny", "u8"),
        Param("scale", "f32"),
        Param("slots", "i64", 2),
    ),
)
CONSTANTS = {"kNumRanks": 3, "kSharedBytes": 1000}
VALUES = {
    "comm": {"peer": [1 << 47, 2, 3], "serial": 0xFFFF_FFFF},
    "x": 0x7F00_0000_1234,
    "rows": -5,
    "tiny": 255,
    "scale": 0.5,
    "slots": (-1, 1 << 62),
}


class FakeDriver:
    """Two blocks on each of 10 SMs; remembers what it was asked."""

    def __init__(self):
        self.launched = []
        self.shared = []

    def prepare(self, function, grid, threads, shared_bytes, params):
        def call(stream):
            address = ctypes.cast(params, ctypes.POINTER(ctypes.c_uint64))[0]
            layout = SPEC.layout(CONSTANTS)
            content = ctypes.string_at(address, layout.nbytes)
            self.launched.append((function, grid, threads, shared_bytes, stream, content))

        return call

    def allow_shared(self, function, nbytes):
        self.shared.append((function, nbytes))

    def blocks_per_sm(self, function, threads, shared_bytes):
        return 2

    def num_sms(self):
        return 10


def packed(**changes):
    return Packed(SPEC.layout(CONSTANTS), {**VALUES, **changes}, "launch of probe")


def launch(driver, **options):
    loaded = Loaded("probe", 0x1234, ())
    return Launch(loaded, SPEC, CONSTANTS, values=VALUES, driver=driver, **options)


def test_the_bytes_are_those_of_the_c_struct():
    assert packed().tobytes() == struct.pack(
        "=3QI4xQiB3xf4x2q",
        *(1 << 47, 2, 3),
        0xFFFF_FFFF,
        0x7F00_0000_1234,
        -5,
        255,
        0.5,
        *(-1, 1 << 62),
    )


def test_numpy_scalars_and_dotted_names():
    flat = {
        "comm.peer": np.array([1, 2, 3], np.uint64).tolist(),
        "comm.serial": np.uint32(7),
        "rows": np.int64(-5),
        "scale": np.float32(0.25),
    }
    rest = {name: value for name, value in VALUES.items() if name != "comm"}
    made = Packed(SPEC.layout(CONSTANTS), {**rest, **flat}, "x")
    assert list(made.slot("comm.peer")) == [1, 2, 3]
    assert made.slot("comm.serial")[0] == 7
    assert made.slot("scale")[0] == 0.25


def test_a_slot_writes_into_the_struct_and_checks_the_range():
    made = packed()
    serial = made.slot("comm.serial")
    serial[0] = 42
    assert struct.unpack_from("=I", made.tobytes(), 24) == (42,)
    with pytest.raises(ValueError, match="format"):
        serial[0] = 1 << 32
    made.set(rows=9, comm={"serial": 8})
    assert (made.slot("rows")[0], serial[0]) == (9, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": 1 << 31}, "field 'rows' takes i32, got 2147483648, which does not fit"),
        ({"tiny": -1}, "field 'tiny' takes u8, got -1, which does not fit"),
        ({"x": -8}, "field 'x' takes const u8*, got -8"),
        ({"x": None}, "field 'x' takes const u8*, got NoneType"),
        ({"x": np.zeros(4, np.uint8)}, "field 'x' takes const u8*, got ndarray"),
        ({"rows": 1.0}, "field 'rows' takes i32, got float"),
        ({"scale": "1"}, "field 'scale' takes f32, got str"),
        ({"slots": [1]}, "field 'slots' takes a sequence of 2 values of i64, got 1 values"),
        ({"slots": 1}, "field 'slots' takes a sequence of 2 values of i64, got int"),
        ({"slots": [1, None]}, "field 'slots[1]' takes i64, got NoneType"),
        ({"nothing": 1}, "there is no field 'nothing'; there are comm.peer, comm.serial, x, "),
        ({"comm": {"serial": 1}}, "no value for comm.peer"),
    ],
)
def test_values_are_checked_when_they_are_bound(changes, said):
    with pytest.raises(ContractError) as raised:
        packed(**changes)
    assert str(raised.value).startswith("launch of probe: ")
    assert said in str(raised.value)


def test_a_launch_takes_the_bytes_as_they_are():
    driver = FakeDriver()
    call = launch(driver, grid=20)
    call(0x99)
    call.slot("rows")[0] = 6
    call(0x98)
    assert [entry[:5] for entry in driver.launched] == [
        (0x1234, 20, 64, 1000, 0x99),
        (0x1234, 20, 64, 1000, 0x98),
    ]
    offset = SPEC.layout(CONSTANTS).fields["rows"].offset
    rows = [struct.unpack_from("=i", entry[5], offset)[0] for entry in driver.launched]
    assert rows == [-5, 6]
    assert driver.shared == [(0x1234, 1000)]


def test_a_grid_that_cannot_be_resident_is_refused_and_never_shrunk():
    driver = FakeDriver()
    assert launch(driver, grid=20).grid == 20
    assert launch(driver, grid=16, reserved_blocks=4).grid == 16
    with pytest.raises(PlatformError) as raised:
        launch(driver, grid=17, reserved_blocks=4)
    assert str(raised.value) == (
        "launch of probe: its 17 blocks of 64 threads and 1000 bytes of shared memory wait for "
        "each other, and this GPU holds 2 a SM on 10 SMs, 20 at once, of which 4 are taken by "
        "kernels that may run beside it; set num_sms to at most 16"
    )
    with pytest.raises(PlatformError, match="20 at once; set num_sms to at most 20"):
        launch(driver, grid=21)
    with pytest.raises(ContractError, match="grid must be >= 1, got 0"):
        launch(driver, grid=0)
    assert driver.launched == []


@pytest.mark.parametrize("spec", list_kernels(), ids=lambda spec: spec.name)
def test_every_kernel_can_be_packed(spec):
    constants = shape_constants("sm_90", num_ranks=3)
    layout = spec.layout(constants)
    zeros = {
        name: 0 if field.count is None else [0] * field.count
        for name, field in layout.fields.items()
    }
    assert Packed(layout, zeros, spec.name).tobytes() == bytes(layout.nbytes)
    assert layout.nbytes <= 4096, "the limit of parameters before CUDA 12.1"


def test_what_does_not_load_is_told():
    pytest.importorskip("cupy")
    with pytest.raises(CompileError) as raised:
        load(b"\x7fELF", "nothing", "nothing.cubin")
    assert "does not load kernel nothing of nothing.cubin" in str(raised.value)


def test_all_kernels_are_on_the_device_before_the_first_call(monkeypatch):
    """The driver loads a kernel at its first use, and cannot while a graph is being captured."""
    asked = []
    monkeypatch.setattr(launches, "compiler_archs", lambda: (90,))
    monkeypatch.setattr(launches, "load", lambda image, entry, name: Loaded(entry, len(image), ()))
    monkeypatch.setattr(launches, "open_cache", lambda: None)
    monkeypatch.setattr(launches, "CudaDriver", lambda: "driver")
    monkeypatch.setattr(
        launches, "occupancy", lambda loaded, *given: asked.append((loaded.entry, *given))
    )
    monkeypatch.setattr(
        launches,
        "build_all",
        lambda requests, *_, **__: [SimpleNamespace(image=b"") for _ in requests],
    )
    group = SimpleNamespace(rank=0, allgather=lambda value: [value])
    constants = shape_constants(90, num_ranks=2, max_row_bytes=64)
    kernels = list_kernels()
    made = launches.Kernels(group, kernels, constants, arch=90, path="bulk")
    assert {entry for entry, *_ in asked} == {each.entry for each in kernels if made.has(each.name)}
    one = next(each for each in kernels if each.name == "dispatch_bulk")
    threads, nbytes = one.num_threads(constants), one.num_shared_bytes(constants)
    assert (one.entry, threads, nbytes, "driver") in asked


# ------------------------------------------------------------------------- the bindings themselves

STUB = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    unsigned char *bytes = params[0];
    printf("%zx %u %u %u %u %u %u %u %zx %d", (size_t)function, gx, gy, gz, bx, by, bz, shared,
           (size_t)stream, extra == 0);
    for (int i = 0; i < 72; ++i) printf("%s%02x", i ? "" : " ", bytes[i]);
    printf("\n");
    fflush(stdout);
    return (size_t)stream == 0x500 ? 700 : 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    printf("attribute %zx %d %d\n", (size_t)function, attribute, value);
    fflush(stdout);
    return value > 200000 ? 1 : 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) {
    *n = 2;
    return 0;
}
int cuCtxGetDevice(int *device) {
    *device = 0;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : 0;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags,
                        int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    *address = self ? dlsym(self, name) : 0;
    if (status) *status = *address ? 0 : 1;
    return *address ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **address, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, address, version, flags, 0);
}
"""

PROGRAM = """
import importlib.util, sys
from deepep_cupy.errors import PlatformError
from deepep_cupy.jit.compile import Loaded
from deepep_cupy.jit.launch import CudaDriver, Launch
spec = importlib.util.spec_from_file_location("launch_test", sys.argv[1])
test = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
loaded = Loaded("probe", 0x1234, ())
call = Launch(loaded, test.SPEC, test.CONSTANTS, grid=264, values=test.VALUES)
call(0x99)
call.slot("rows")[0] = 6
call(0x98)
for refused in (lambda: call(0x500), lambda: CudaDriver().allow_shared(1, 300000),
                lambda: Launch(loaded, test.SPEC, test.CONSTANTS, grid=265, values=test.VALUES)):
    try:
        refused()
    except PlatformError as error:
        print("refused:", error)
"""


def test_cuda_bindings_pass_the_prepacked_struct(tmp_path):
    pytest.importorskip("cuda.bindings")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here for the stub of the driver")
    (tmp_path / "stub.c").write_text(STUB)
    library = tmp_path / "libcuda.so.1"
    build = [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "stub.c", "-ldl"]
    subprocess.run(build, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM, __file__],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = packed().tobytes()
    changed = packed(rows=6).tobytes()
    lines = done.stdout.splitlines()
    assert lines[0] == "attribute 1234 8 1000"
    assert lines[1] == f"1234 264 1 1 64 1 1 1000 99 1 {content.hex()}"
    assert lines[2] == f"1234 264 1 1 64 1 1 1000 98 1 {changed.hex()}"
    refusals = [line for line in lines if line.startswith("refused:")]
    assert "cuLaunchKernel: the driver answered" in refusals[0]
    assert "allowing 300000 bytes of shared memory a block" in refusals[1]
    assert "2 a SM on 132 SMs, 264 at once" in refusals[2]
