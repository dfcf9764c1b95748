"""Every kernel text is C++17 for the host too, and every wrapper has its host form."""

import re
from pathlib import Path

import pytest

from deepep_cupy._resources import kernel_dir
from deepep_cupy.engines.gpu.kernels import KERNELS
from deepep_cupy.protocol.constants import KernelShape, kernel_constants
from simulator.build import SIM, check_syntax, kernel_text

SHAPES = {
    "small": KernelShape(num_ranks=3, max_row_bytes=96, num_threads=64),
    "large-nc": KernelShape(num_ranks=8, loads="nc"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [spec.name for spec in KERNELS])
def test_kernel_text_compiles_for_the_host(name, shape):
    spec = next(spec for spec in KERNELS if spec.name == name)
    complaints = check_syntax(kernel_text(spec, kernel_constants(SHAPES[shape])))
    assert not complaints, complaints[:6000]


def functions(path: Path) -> dict[str, str]:
    """Name -> return type and parameter types of each wrapper; the simulator's Where left out."""
    text = re.sub(r",?\s*sim::Where where = SIM_HERE", "", path.read_text())
    found = {}
    for match in re.finditer(r"^DEVICE ([\w&]+) (\w+)\(([^)]*)\)", text, re.MULTILINE):
        result, name, parameters = match.groups()
        types = [re.sub(r"\s*\b\w+$", "", p.strip()) for p in parameters.split(",") if p.strip()]
        found[name] = f"{result} ({', '.join(types)})"
    return found


def test_every_wrapper_has_its_host_form():
    for ours in sorted((kernel_dir() / "asm").glob("*.cuh")):
        host = functions(SIM / "asm" / ours.name)
        for name, signature in functions(ours).items():
            assert name in host, f"tests/sim/asm/{ours.name} lacks {name}()"
            assert host[name] == signature, f"tests/sim/asm/{ours.name}: {name}() differs"
        names = set(re.findall(r"#define (\w+)", ours.read_text()))
        assert names <= set(re.findall(r"#define (\w+)", (SIM / "asm" / ours.name).read_text()))


def test_only_wrappers_name_instructions():
    for path in sorted(kernel_dir().rglob("*.cu*")):
        if path.parent.name != "asm":
            text = re.sub(r"//[^\n]*", "", path.read_text())
            found = re.findall(r"\basm\b\s*\w*\s*\(|__syncthreads|__shared__|threadIdx", text)
            assert not found, f"{path}: {found} belong into asm/"
