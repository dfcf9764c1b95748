"""A course in three small kernels: how a GPU reads what another GPU has just written.

1 a coherent load, 2 a non-coherent load and what L1 does to it, 3 a bulk copy with an mbarrier and
a proxy fence. Each is compiled here and now by NVRTC, and its memory instructions are explained in
the order of the PTX. The same three are then found in the kernels that really move rows. No GPU,
no driver and no MPI are needed, only CuPy and NVRTC (the extra "cuda13" or "cuda12"); with a GPU
lesson 2 also runs. The whole kernels: python -m deepep_cupy kernels show --html FOLDER

USAGE:
    python examples/05_read_the_ptx.py
    python examples/05_read_the_ptx.py --arch sm_80 --loads nc --ranks 4 --hidden 4096
    python examples/05_read_the_ptx.py --full > course.txt      (all of the texts and the PTX)

Expected output: three lessons, where the real kernels do the same, and
    OK: the three lessons, combine and dispatch_bulk have the instructions they are said to have
"""

import sys
import textwrap

from course import FOLDER, heading, options, run_lesson_2

from deepep_cupy import DeepEPCupyError, env, kernel_options, kernel_ptx, kernel_source
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.inspect.listing import read_ptx, site, source_lines
from deepep_cupy.inspect.notes import NOTES, is_memory, stem
from deepep_cupy.jit.compile import compile_text, parse_target
from deepep_cupy.jit.inspect import statements

LESSON_2 = ["ld.global.nc.L1::no_allocate", "st.relaxed.gpu.global"]
BULK = [
    *("mbarrier.init.shared::cta", "fence.mbarrier_init.release.cluster"),
    "fence.proxy.async.global",
    *("mbarrier.arrive.expect_tx.shared::cta", "mbarrier.try_wait.parity.shared::cta"),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    *("cp.async.bulk.global.shared::cta.bulk_group", "cp.async.bulk.commit_group"),
    "cp.async.bulk.wait_group",
]
COHERENT = ["ld.relaxed.sys.global", "ld.acquire.sys.global", "ld.relaxed.sys.global.v4"]
NON_COHERENT = ["ld.global.nc.L1::no_allocate", "ld.global.nc.L1::no_allocate.L2::256B"]
PLAIN = ["ld.global.L1::no_allocate", "st.global.L1::no_allocate"]


def main() -> int:
    """The three lessons, then the real kernels; 0 when all have what they must have."""
    args = options(__doc__)
    arch = parse_target(args.arch).arch
    wish = args.loads or env.loads()
    loads = policy.resolve(wish, arch, gpu="", driver="", across_gpus=True).loads
    wrong = lesson(args, "1_coherent", COHERENT)
    wrong += lesson(args, "2_non_coherent", LESSON_2)
    seen, bad = run_lesson_2()
    print(f"\n{seen}")
    wrong += bad
    if arch >= 90:
        wrong += lesson(args, "3_bulk_copy", BULK)
    else:
        print(f"\nLesson 3 is left out: {args.arch} has no bulk copy engine; --arch sm_90 has.")

    wanted = NON_COHERENT if loads == "nc" else COHERENT
    wrong += real(args, "combine", loads, wanted)
    moves = "dispatch_bulk" if arch >= 90 else "dispatch"
    plain = PLAIN if loads != "nc" else [NON_COHERENT[1], PLAIN[1]]
    wrong += real(args, moves, loads, BULK if arch >= 90 else plain)
    said = f"the three lessons, combine and {moves} have the instructions they are said to have"
    print("\n" + (f"WRONG: {'; '.join(wrong)}" if wrong else f"OK: {said}"))
    return 1 if wrong else 0


def lesson(args, name, wanted):
    """Compile one lesson, print it with its instructions; what it lacks."""
    text = (FOLDER / f"{name}.cu").read_text()
    given = kernel_options(arch=args.arch)
    made = compile_text(
        text, name=name, entry="lesson", target=parse_target(args.arch), options=given
    )
    heading(f"{name}.cu: {len(text.splitlines())} lines, {made.resources.registers} registers")
    print(text)
    print(made.ptx if args.full else explained(made.ptx, text.splitlines(), f"{name}.cu"))
    return lacking(name, made.ptx, wanted)


def explained(ptx, lines, file):
    """Each memory instruction in order, the line that asked for it, and at first what it means."""
    told, rows = set(), []
    for op in read_ptx(ptx):
        if not is_memory(op.opcode):
            continue
        line = site(op.chain)[0][1] if op.chain else 0
        said = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        rows.append(f"{op.text}\n    {file}:{line}  {said}")
        if stem(op.opcode) not in told and stem(op.opcode) in NOTES:
            rows.append(textwrap.indent(textwrap.fill(NOTES[stem(op.opcode)].text, 92), "        "))
        told.add(stem(op.opcode))
    return "\n".join(rows)


def real(args, name, loads, wanted):
    """Find a lesson's instructions in a kernel of the library; what it lacks, or has too much."""
    shape = {"num_ranks": args.ranks, "max_row_bytes": 2 * args.hidden, "loads": loads}
    # The library: the very text that a Buffer compiles, and its PTX.
    text, ptx = kernel_source(name, args.arch, **shape), kernel_ptx(name, args.arch, **shape)
    sources, ops = source_lines(text, name), read_ptx(ptx)
    heading(f"The real {name}, {loads} loads: {len(text.splitlines())} lines, {len(ops)} PTX")
    if args.full:
        print(text, ptx)
    for wanted_one in wanted:
        same = [op for op in ops if stem(op.opcode) == wanted_one and op.chain]
        places = dict.fromkeys(site(op.chain)[0] for op in same)
        print(f"{len(same):4d}  {wanted_one}")
        for file, number in list(places)[:3]:
            print(f"          {file}:{number}  {sources[file][number].strip()}")
    nc = {op.opcode for op in ops if ".nc." in op.opcode}
    bad = [op for op in nc if loads == "coherent" or "L1::no_allocate" not in op]
    print(f"      non-coherent loads: {', '.join(sorted(nc)) or 'none'}")
    return [*lacking(name, ptx, wanted), *(f"{name} has {op}" for op in bad)]


def lacking(name, ptx, wanted):
    """What a PTX text must have and has not."""
    found = {stem(one.opcode) for one in statements(ptx)}
    return [f"{name} lacks {each}" for each in wanted if each not in found]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeepEPCupyError as error:
        sys.exit(f"error: {error}")
