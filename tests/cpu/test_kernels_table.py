"""Every kernel, every architecture, both loads: compiled, and compared with kernel_table.toml.

``python tests/cpu/test_kernels_table.py --write`` writes the numbers of the table anew, after a
change that was meant to change them. The rules above them are written by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")

from deepep_cupy.engines.gpu.kernels import get_kernel, list_kernels, shape_constants
from deepep_cupy.inspect.notes import NOTES, is_memory, stem
from deepep_cupy.jit.build import Request, build, open_cache
from deepep_cupy.jit.compile import Target, compiler_version
from deepep_cupy.jit.inspect import disassemble, find_tool, opcodes

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("kernel_table.toml")
ARCHES = (80, 90, 100, 120)
LOADS = ("coherent", "nc")
STEP = 8
"""Registers are handed out in eights; a limit is the next multiple."""
RULE_KEYS = {"why", "kernels", "loads", "arches", "required", "forbidden", "forbidden_sass"}

CASES = [
    (spec.name, arch, loads)
    for spec in list_kernels()
    for arch in ARCHES
    if arch >= spec.min_arch
    for loads in LOADS
]
PARAMS = [
    pytest.param(
        case,
        id="{}-sm_{}-{}".format(*case),
        marks=[] if case[1:] == (90, "coherent") else pytest.mark.slow,
    )
    for case in CASES
]
"""One architecture and its usual loads by default, for the sake of time; CI runs them all."""


def table():
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def compile_apart(names, arch, loads):
    """Compile into the cache in a process of its own, which some compilers crash; what it said."""
    command = [sys.executable, "-m", "deepep_cupy", "kernels", "compile", *names]
    command += ["--arch", f"sm_{arch}", "--loads", loads]
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_RANK")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip() or 'the compiler crashed'}"
    return ""


def compile_all(cases):
    """What went wrong, by case; empty where nothing did.

    Half of an architecture's kernels in one process, and where that fails, each in one of its own.
    """
    names = {}
    for name, arch, loads in cases:
        names.setdefault((arch, loads), []).append(name)
    halves = [(some[at::2], *how) for how, some in names.items() for at in (0, 1) if some[at::2]]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        said = pool.map(lambda half: compile_apart(*half), halves)
        failed = [half for half, words in zip(halves, said, strict=True) if words]
        alone = [(name, *how) for some, *how in failed for name in some]
        said = pool.map(lambda case: compile_apart([case[0]], *case[1:]), alone)
        wrong = dict(zip(alone, said, strict=True))
    return {case: wrong.get(case, "") for case in cases}


@pytest.fixture(scope="module")
def failures(request):
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params["case"] for spec in chosen if spec and "case" in spec.params}
    return compile_all([case for case in CASES if case in wanted])


def built(case):
    name, arch, loads = case
    request = Request(get_kernel(name), shape_constants(arch, loads=loads), Target(arch))
    return build(request, open_cache())


def numbers_of(case):
    """What the table says of one case: registers a thread, static and dynamic shared bytes."""
    name, arch, loads = case
    used = built(case).compiled.resources
    dynamic = get_kernel(name).num_shared_bytes(shape_constants(arch, loads=loads))
    limit = -(-used.registers // STEP) * STEP
    return {"registers": limit, "shared": used.shared_bytes + dynamic}


def applies(rule, case):
    name, arch, loads = case
    return (
        name in rule.get("kernels", [name])
        and arch in rule.get("arches", [arch])
        and loads in rule.get("loads", [loads])
    )


def broken(rule, found, key="forbidden"):
    """What of ``found`` a rule forbids, and what it requires that is not there."""
    forbidden = [
        f"has {name}"
        for name in found
        if any(re.fullmatch(pattern, name) for pattern in rule.get(key, []))
    ]
    required = rule.get("required", []) if key == "forbidden" else []
    lacking = [
        f"lacks {pattern}"
        for pattern in required
        if not any(re.fullmatch(pattern, name) for name in found)
    ]
    return forbidden + lacking


# -------------------------------------------------------------------------------- the comparison


@pytest.mark.parametrize("case", PARAMS)
def test_it_compiles_without_local_memory(case, failures):
    assert failures[case] == ""
    used = built(case).compiled.resources
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)


@pytest.mark.parametrize("case", PARAMS)
def test_registers_and_shared_memory(case, failures):
    assert failures[case] == ""
    major = compiler_version().split(".")[0]
    numbers = table().get("numbers", {}).get(f"nvrtc{major}")
    if numbers is None:
        pytest.skip(f"the table has no numbers for NVRTC {major}")
    name, arch, loads = case
    allowed = numbers[name][loads][f"sm_{arch}"]
    found = numbers_of(case)
    hint = "; if this is meant: python tests/cpu/test_kernels_table.py --write"
    assert found["registers"] <= allowed["registers"], f"{found} > {allowed}{hint}"
    assert found["shared"] == allowed["shared"], f"{found} is not {allowed}{hint}"


@pytest.mark.parametrize("case", PARAMS)
def test_required_and_forbidden_instructions(case, failures):
    assert failures[case] == ""
    found = sorted({opcode for opcode, _, _ in opcodes(built(case).compiled.ptx)})
    problems = [
        f"{problem} ({rule['why']})"
        for rule in table()["rule"]
        if applies(rule, case)
        for problem in broken(rule, found)
    ]
    assert problems == []


@pytest.mark.parametrize("case", PARAMS)
def test_forbidden_machine_instructions(case, failures):
    """What ptxas makes of the PTX, too."""
    assert failures[case] == ""
    rules = [rule for rule in table()["rule"] if "forbidden_sass" in rule and applies(rule, case)]
    if not rules:
        return
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    found = sass_opcodes(disassemble(built(case).compiled.cubin))
    moves = [opcode for opcode in found if opcode.startswith(("LDG", "UBLKCP"))]
    assert moves, "the reading of SASS is broken"
    problems = [problem for rule in rules for problem in broken(rule, found, "forbidden_sass")]
    assert problems == []


@pytest.mark.parametrize("case", PARAMS)
def test_every_memory_and_ordering_instruction_has_a_note(case, failures):
    """What ``kernels show --html`` says of it (``deepep_cupy/inspect/notes.py``)."""
    assert failures[case] == ""
    found = {opcode for opcode, _, _ in opcodes(built(case).compiled.ptx) if is_memory(opcode)}
    assert found, "the reading of PTX is broken"
    assert {opcode: stem(opcode) for opcode in found if stem(opcode) not in NOTES} == {}


def sass_opcodes(text):
    pattern = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
    return sorted(set(pattern.findall(text)))


# ------------------------------------------------------------------------------- the table itself


def test_the_table_speaks_of_kernels_that_exist():
    names = {spec.name for spec in list_kernels()}
    for rule in table()["rule"]:
        assert set(rule) <= RULE_KEYS
        assert rule["why"]
        assert set(rule.get("kernels", [])) <= names
        assert set(rule.get("loads", [])) <= set(LOADS)
        assert set(rule.get("arches", [])) <= set(ARCHES)
        for key in ("required", "forbidden", "forbidden_sass"):
            assert all(re.compile(pattern) for pattern in rule.get(key, []))
    for numbers in table().get("numbers", {}).values():
        assert set(numbers) == names, "write the numbers anew"


def test_every_kernel_has_a_rule_of_its_own_or_with_few_others():
    named = {name for rule in table()["rule"] for name in rule.get("kernels", [])}
    assert named == {spec.name for spec in list_kernels()}


def test_rules_can_be_broken():
    rule = {"forbidden": [r"ld\.global\.nc\..*"], "required": [r"fence\.acq_rel\.sys"]}
    assert broken(rule, ["fence.acq_rel.sys", "ld.global.u32"]) == []
    assert broken(rule, ["fence.acq_rel.gpu", "ld.global.nc.u32"]) == [
        "has ld.global.nc.u32",
        r"lacks fence\.acq_rel\.sys",
    ]
    by_kind = {rule["why"]: rule for rule in table()["rule"]}
    coherent = next(rule for why, rule in by_kind.items() if why.startswith("coherent: no non"))
    for opcode in ("ld.global.nc.u32", "ld.global.nc.L1::no_allocate.L2::256B.v4.u32"):
        assert broken(coherent, [opcode]), opcode
    assert broken(coherent, ["LDG.E.128.CONSTANT"], "forbidden_sass")
    assert not broken(coherent, ["ld.global.v4.u32"])


# ------------------------------------------------------------------------------------ regenerating


def write():
    """Write the numbers of this compiler's major version into the table, keeping the others."""
    failed = {case: said for case, said in compile_all(CASES).items() if said}
    if failed:
        raise SystemExit("\n".join(f"{case}: {said}" for case, said in failed.items()))
    major = compiler_version().split(".")[0]
    all_numbers = dict(table().get("numbers", {}))
    mine = {}
    for case in CASES:
        name, arch, loads = case
        mine.setdefault(name, {}).setdefault(loads, {})[f"sm_{arch}"] = numbers_of(case)
    all_numbers[f"nvrtc{major}"] = mine
    text = TABLE.read_text(encoding="utf-8")
    head = text[: text.index("# Numbers, generated:")]
    head += text[len(head) :].splitlines()[0] + "\n"
    lines = []
    for compiler, kernels in sorted(all_numbers.items()):
        for name, by_loads in kernels.items():
            for loads, by_arch in by_loads.items():
                lines += ["", f"[numbers.{compiler}.{name}.{loads}]"]
                lines += [
                    f"{arch} = {{ registers = {one['registers']}, shared = {one['shared']} }}"
                    for arch, one in by_arch.items()
                ]
    TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
