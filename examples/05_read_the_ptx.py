"""Read the dispatch kernel: its CUDA text, the PTX the compiler made of it, and what to look for.

The text is compiled here and now by NVRTC for the architecture you name. No GPU and no driver are
needed, and no MPI: only CuPy and NVRTC (the extra "cuda13" or "cuda12").

USAGE:
    python examples/05_read_the_ptx.py
    python examples/05_read_the_ptx.py --arch sm_80 --ranks 4 --hidden 4096
    python examples/05_read_the_ptx.py --full > dispatch.txt      (all of the text and the PTX)

Expected output: three numbered parts, and
    OK: the rows of dispatch_bulk move as part 3 says
"""

import argparse
import re
import sys
import textwrap

from deepep_cupy import kernel_ptx, kernel_source
from deepep_cupy.jit.inspect import count_instructions, memory_instructions

# Beginning of an instruction, and what it is there for.
LOOK_FOR = {
    "cp.async.bulk.shared::cluster.global": "a piece of a row comes into shared memory, once; the "
    "copy engine does it and no register sees the bytes",
    "mbarrier.try_wait": "... and this waits for it",
    "cp.async.bulk.global.shared::cta": "the piece leaves for each rank that gets the row, over "
    "NVLink, straight to its final place in recv_x",
    "cp.async.bulk.wait_group.read": "a stage of shared memory may be filled again: its bytes have "
    "been read, which says nothing about where they are",
    "cp.async.bulk.wait_group": "without .read: the bytes are written. It must come before the "
    "release below, in the thread that issued the copies",
    "fence.proxy.async": "orders ordinary accesses and the copy engine's",
    "ld.global.L1::no_allocate.v4": "16 bytes of a row, past the L1 cache: nobody reads them twice",
    "st.global.L1::no_allocate.v4": "the same 16 bytes to a rank's memory, to their final place",
    "fence.acq_rel.sys": "release for many: all that came before it is visible to whoever acquires "
    "one of the relaxed stores that follow",
    "st.release.sys": "release for one: all that came before is visible to who acquires this word",
    "st.relaxed.sys": "words for other ranks: headers, counts, arrivals. Alone they order nothing",
    "ld.relaxed.sys": "polling of words that others write, in memory near this GPU; orders nothing",
    "ld.acquire.sys": "once a poll has seen its word: what the other rank released may be read now",
    "atom.acq_rel.gpu": "which block of this GPU is the last one; it speaks to the other ranks",
    "ld.acquire.gpu": "words that blocks of this GPU leave for each other",
}
BULK = {"cp.async.bulk.shared::cluster.global", "cp.async.bulk.global.shared::cta"}
BULK_WAITS = {"cp.async.bulk.wait_group", "mbarrier.try_wait"}
PLAIN = {"ld.global.L1::no_allocate.v4", "st.global.L1::no_allocate.v4"}
ALWAYS = {"ld.relaxed.sys", "ld.acquire.sys"}
RELEASES = {"fence.acq_rel.sys", "st.release.sys"}


def main() -> int:
    """Print the three parts; 0 when the instructions are those that part 3 explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", help="architecture, default sm_90")
    parser.add_argument("--ranks", type=int, default=8, help="ranks it is compiled for")
    parser.add_argument("--hidden", type=int, default=7168, help="bfloat16 numbers in a row")
    parser.add_argument("--full", action="store_true", help="print all of the text and the PTX")
    args = parser.parse_args()
    bulk = int(re.sub(r"\D", "", args.arch) or 0) >= 90
    name = "dispatch_bulk" if bulk else "dispatch"
    shape = {"num_ranks": args.ranks, "max_row_bytes": 2 * args.hidden}

    # The library: the very text that a Buffer compiles, and its PTX.
    source = kernel_source(name, args.arch, **shape)
    ptx = kernel_ptx(name, args.arch, **shape)

    file = "dispatch/bulk.cu" if bulk else "dispatch/ldst.cu"
    heading(f"1. CUDA text of {name}: {len(source.splitlines())} lines, here {file}")
    print(source if args.full else own_file(source, file))
    heading(f"2. PTX for {args.arch}: {len(ptx.splitlines())} lines, here where a row leaves")
    print(ptx if args.full else around(ptx, "cp.async.bulk.global" if bulk else "st.global.L1::no"))

    # The library: how often each memory instruction occurs.
    counts = count_instructions(memory_instructions(ptx))
    heading("3. Memory instructions, and what to look for")
    found = set()
    for opcode, count in counts.items():
        begins = [start for start in LOOK_FOR if opcode.startswith(start)]
        meaning = max(begins, key=len, default=None)
        found.add(meaning)
        print(f"{count:4d}  {opcode}")
        if meaning:
            print(textwrap.indent(textwrap.fill(LOOK_FOR[meaning], 90), "        "))
    wanted = ALWAYS | (BULK | BULK_WAITS if bulk else PLAIN)
    good = wanted <= found and bool(RELEASES & found)
    print(f"\n{'OK' if good else 'WRONG'}: the rows of {name} move as part 3 says")
    return 0 if good else 1


def heading(text):
    """A line that stands out."""
    print(f"\n=== {text} " + "=" * max(0, 94 - len(text)) + "\n")


def own_file(source, file):
    """The part of the flattened text that comes from ``file``: after its ``#line``, to the next."""
    lines, inside = [], False
    for line in source.splitlines():
        if line.startswith("#line"):
            inside = line.rstrip('"').endswith(f"/{file}")
        elif inside:
            lines.append(line)
    return "\n".join(lines)


def around(ptx, opcode):
    """The head of the PTX, and the surroundings of the first ``opcode``, without line numbers."""
    lines = [line for line in ptx.splitlines() if ".loc" not in line and line.strip()]
    at = next((i for i, line in enumerate(lines) if line.lstrip().startswith(opcode)), 0)
    entry = next(i for i, line in enumerate(lines) if ".entry" in line)
    return "\n".join([*lines[entry - 1 : entry + 6], "  ...", *lines[max(0, at - 24) : at + 12]])


if __name__ == "__main__":
    sys.exit(main())
