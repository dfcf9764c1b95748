"""Every real kernel, read line by line: its page, and what the choice of loads changes.

By default one kernel each; ``-m slow`` all, for four architectures. That each memory instruction
has a note is tested where all kernels are compiled, in ``test_kernels_table.py``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")

from deepep_cupy.engines.gpu.kernels import get_kernel, list_kernels, shape_constants
from deepep_cupy.inspect.difference import compare
from deepep_cupy.inspect.listing import Listing
from deepep_cupy.inspect.notes import kind_of_sass
from deepep_cupy.inspect.page import kernel_page
from deepep_cupy.inspect.purpose import count_purposes
from deepep_cupy.jit.build import Request, build, open_cache
from deepep_cupy.jit.compile import Target
from deepep_cupy.jit.inspect import find_tool

ARCHES = (80, 90, 100, 120)
LOADS = ("coherent", "nc")
MOST_BYTES = 3_000_000
MOST_OTHER = 0.05


def cases(by_default, arches=ARCHES):
    """Every kernel for these architectures; one of them is not slow."""
    return [
        pytest.param(
            spec.name,
            arch,
            id=f"{spec.name}-sm_{arch}",
            marks=[] if (spec.name, arch) == (by_default, 90) else pytest.mark.slow,
        )
        for spec in list_kernels()
        for arch in arches
        if arch >= spec.min_arch
    ]


def listing(name, arch, loads):
    constants = shape_constants(arch, loads=loads)
    spec = get_kernel(name)
    return Listing.of(
        build(Request(spec, constants, Target(arch)), open_cache()).compiled,
        threads=constants["kNumThreads"],
        dynamic_shared=spec.num_shared_bytes(constants),
    )


@pytest.mark.parametrize(("name", "arch"), cases("dispatch_bulk", arches=(90,)))
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


@pytest.mark.parametrize(("name", "arch"), cases("combine"))
def test_the_choice_of_loads_changes_loads_alone(name, arch):
    pair = [listing(name, arch, loads) for loads in LOADS]
    found = compare(*pair)
    assert found.only_loads, found.verdict
    # And of machine code, no instruction of memory but loads: the rest is the register allocator's.
    kinds = {op.opcode: kind_of_sass(op) for read in pair for op in read.sass}
    assert not [one for one in found.sass if kinds[one.opcode] and not one.is_load]
    if name == "combine":
        assert any(".nc." in change.opcode and change.second for change in found.ptx)
        assert not any(".nc." in change.opcode and change.first for change in found.ptx)
