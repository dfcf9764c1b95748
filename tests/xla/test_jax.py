"""``deepep_cupy.jax`` on CPUs: compiled programs on the ranks, and the layout of XLA's structs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ranks import run_ranks

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

from deepep_cupy.jax.ffi import LAYOUT  # noqa: E402 - JAX may be missing

WORKER = Path(__file__).with_name("jax_worker.py")
SHARDS = Path(__file__).with_name("shard_worker.py")
RUN = Path(__file__).parents[1] / "mpi" / "with_fault.py"
ON_CPUS = {"JAX_PLATFORMS": "cpu"}
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.mpi
def test_programs_on_the_ranks(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=280, environment=ON_CPUS)
    run.check()
    done = re.findall(r"s (\w+)$", run.outputs[0], re.MULTILINE)
    assert (
        len(done)
        == len(set(done))
        == len(re.findall(r"^@(?:scenario|on_cpu)$", WORKER.read_text(), re.MULTILINE))
    )


@pytest.mark.mpi
def test_bench(num_ranks):
    sizes = ("--tokens", "3,9", "--hidden", "16", "--experts", "24", "--topk", "2")
    command = ("none", "deepep_cupy", "bench", "jax", *sizes, "--repeats", 2)
    run = run_ranks(RUN, num_ranks, *command, environment=ON_CPUS)
    run.check()
    names = re.findall(r"^ +[39]  (eager|jax.jit) +\d+$", run.outputs[0], re.MULTILINE)
    assert names == 2 * ["eager", "jax.jit"], run
    assert "equal, to the bit" in run.outputs[0]


@pytest.mark.mpi
def test_decoding_and_programs_from_the_persistent_cache(num_ranks, tmp_path):
    if 8 % num_ranks:
        pytest.skip("8 experts are for 1, 2, 4 or 8 ranks")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    kept = []
    for _ in range(2):
        run = run_ranks(EXAMPLES / "10_jax_decode.py", num_ranks, environment={**ON_CPUS, **cache})
        run.check()
        assert "OK: scores of all 48 steps are the dense block's" in run.outputs[0]
        kept.append({path.name for path in tmp_path.rglob("jit_step*-cache")})
    assert kept[0]
    assert kept[0] == kept[1]


@pytest.mark.mpi
def test_shard_map(num_ranks):
    run = run_ranks(SHARDS, num_ranks, limit_s=120)
    run.check()
    assert run.outputs[0].count(": ok") == 2, run


@pytest.mark.mpi
def test_the_example_learns(num_ranks):
    if 8 % num_ranks:
        pytest.skip("8 experts are for 1, 2, 4 or 8 ranks")
    run = run_ranks(EXAMPLES / "08_jax_digits.py", num_ranks, limit_s=200, environment=ON_CPUS)
    run.check()
    assert re.search(r"^OK: .* the dense layer's", run.outputs[0], re.MULTILINE), run


def test_layouts_are_those_of_the_header(tmp_path):
    """A C compiler says where the members lie that ``ffi`` reads."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = []
    for name in LAYOUT:
        struct, _, member = name.partition(".")
        lines.append(f'printf("%zu\\n", offsetof({struct}, {member}));')
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\n'
        "int main(void) {" + "".join(lines) + "return 0;}"
    )
    program = tmp_path / "offsets"
    command = [compiler, "-I", jax.ffi.include_dir(), source, "-o", program]
    subprocess.run(command, check=True, timeout=60)
    printed = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True)
    found = dict(zip(LAYOUT, map(int, printed.stdout.split()), strict=True))
    assert found == {name: 8 * word for name, word in LAYOUT.items()}
