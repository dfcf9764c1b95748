"""What example 05 needs besides the library: its options, and lesson 2 on a GPU."""

import argparse
from pathlib import Path

from deepep_cupy import ContractError, kernel_options

FOLDER = Path(__file__).with_name("lessons")
ROUNDS, TIMEOUT_NS = 1000, 2_000_000_000
NOT_RUN = "Lesson 2 was compiled and not run: there is no GPU here"


def options(doc):
    """The command line; a ContractError where a number makes no sense."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", help="architecture, default sm_90")
    parser.add_argument(
        "--loads", choices=("coherent", "nc"), help="of the real kernels; default: as a Buffer"
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks they are compiled for")
    parser.add_argument("--hidden", type=int, default=7168, help="bfloat16 numbers in a row")
    parser.add_argument("--full", action="store_true", help="print all of the texts and the PTX")
    args = parser.parse_args()
    for name, most in (("ranks", 8), ("hidden", 1 << 20)):
        if not 1 <= getattr(args, name) <= most:
            raise ContractError(f"--{name} must be 1 to {most}, got {getattr(args, name)}")
    return args


def heading(text):
    """A line that stands out."""
    print(f"\n=== {text} " + "=" * max(0, 94 - len(text)) + "\n")


def run_lesson_2():
    """Run the non-coherent load both ways, where there is a GPU: what was seen, what is wrong."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < 1:
            return f"{NOT_RUN}.", []
    except Exception as error:  # noqa: BLE001 - whatever keeps a GPU from being used
        return f"{NOT_RUN} ({type(error).__name__}: {error}).", []
    text = (FOLDER / "2_non_coherent.cu").read_text()
    seen, wrong = [], []
    for name, define in (("ld.global.nc", "ALLOCATE"), ("ld.global.nc.L1::no_allocate", "")):
        given = kernel_options() + ((f"-D{define}",) if define else ())
        kernel = cupy.RawModule(code=text, options=given).get_function("lesson")
        lines = [cupy.zeros(64, cupy.uint32) for _ in range(4)]
        kernel((2,), (1,), (*lines, cupy.uint32(ROUNDS), cupy.uint64(TIMEOUT_NS)))
        old, rounds = (int(count) for count in lines[3][:2])
        seen.append(f"{name}: {old} of {rounds} reads were old")
        if rounds != ROUNDS or (not define and old):
            wrong.append(f"lesson 2 saw {seen[-1]}")
    return "Lesson 2 on this GPU: " + "; ".join(seen) + ".", wrong
