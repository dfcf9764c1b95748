"""Every real kernel, read line by line: its notes, its page, and what the choice of loads changes.

By default one architecture; ``-m slow`` all four, whose pages ``.ci/run`` builds too.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")

from deepep_cupy.engines.gpu.kernels import get_kernel, list_kernels, shape_constants
from deepep_cupy.inspect.difference import compare
from deepep_cupy.inspect.listing import Listing
from deepep_cupy.inspect.notes import is_memory, note_of
from deepep_cupy.inspect.page import kernel_page
from deepep_cupy.inspect.purpose import count_purposes
from deepep_cupy.jit.build import Request, build, open_cache
from deepep_cupy.jit.compile import Target
from deepep_cupy.jit.inspect import find_tool

ARCHES = (80, 90, 100, 120)
LOADS = ("coherent", "nc")
MOST_BYTES = 3_000_000
MOST_OTHER = 0.05


def cases(*more):
    return [
        pytest.param(
            spec.name,
            arch,
            *also,
            id="-".join([spec.name, f"sm_{arch}", *also]),
            marks=[] if arch == 90 and also in ((), ("coherent",)) else pytest.mark.slow,
        )
        for spec in list_kernels()
        for arch in ARCHES
        if arch >= spec.min_arch
        for also in (more or ((),))
    ]


def compiled(name, arch, loads):
    request = Request(get_kernel(name), shape_constants(arch, loads=loads), Target(arch))
    return build(request, open_cache())


def listing(name, arch, loads):
    built = compiled(name, arch, loads)
    constants = built.request.constants
    return Listing.of(
        built.compiled,
        threads=constants["kNumThreads"],
        dynamic_shared=built.request.spec.num_shared_bytes(constants),
    )


@pytest.mark.parametrize(("name", "arch", "loads"), cases(*((loads,) for loads in LOADS)))
def test_every_memory_and_ordering_instruction_has_a_note(name, arch, loads):
    from deepep_cupy.jit.inspect import opcodes

    found = {opcode for opcode, _, _ in opcodes(compiled(name, arch, loads).compiled.ptx)}
    assert [opcode for opcode in found if is_memory(opcode)], "the reading of PTX is broken"
    for opcode in sorted(found):
        note_of(opcode)  # a KeyError names the one that has none


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=[] if case.values == ("dispatch_bulk", 90) else pytest.mark.slow,
        )
        for case in cases()
    ],
)
def test_the_page_is_small_and_its_code_has_a_purpose(name, arch):
    read = listing(name, arch, "coherent")
    page = kernel_page(read, "a test")
    assert len(page.encode()) <= MOST_BYTES
    assert all(read.text_of(place) for op in read.ptx for place in op.chain if place[1])
    if find_tool("nvdisasm") is None:
        assert "PTX alone:" in page
        return
    assert len(read.sass) > 20
    assert sum(bool(op.chain) for op in read.sass) > 0.95 * len(read.sass)
    counted = count_purposes(read, read.sass)
    assert counted["other"] <= max(60, MOST_OTHER * sum(counted.values())), counted


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=[] if case.values == ("combine", 90) else pytest.mark.slow,
        )
        for case in cases()
    ],
)
def test_the_choice_of_loads_changes_loads_alone(name, arch):
    pair = [listing(name, arch, loads) for loads in LOADS]
    found = compare(*pair)
    assert found.only_loads, found.verdict
    if name == "combine":
        assert any(".nc." in change.opcode and change.second for change in found.ptx)
        assert not any(".nc." in change.opcode and change.first for change in found.ptx)
