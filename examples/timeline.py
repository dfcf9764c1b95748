"""For example 06: experts, when pieces of work begin and end, a table and a picture of it."""

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARM_UP = 5
HEAD_START = 8
"""Large products that a GPU is given first, so that Python has queued a run before it begins."""
COLORS = {"A": "#47a", "B": "#c45"}


def options(description):
    """The command line, the same on every rank."""

    def count(text):
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--out", metavar="FOLDER", type=Path, help="draw overlap.png there")
    add("--num-sms", metavar="N", type=count, default=8, help="SMs of a call beside the experts: 8")
    add("--gemm-sms", metavar="N", type=count, help="SMs the experts plan with then: all others")
    add("--runs", metavar="N", type=count, default=20, help="timed runs of each way: 20")
    args = parser.parse_args()
    if args.out is not None:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--out needs matplotlib: pip install 'deepep_cupy[examples]'")
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: no folder can be made there: {error}")
    return args


# --------------------------------------------------------------------------------- the experts


class Experts:
    """The experts of a rank: two matrix products each.

    All numbers are small and whole (thirty-seconds, in the end), so that products and their sums
    are exact in every order of addition: no result depends on cuBLAS's choice of a kernel.
    """

    def __init__(self, xp, rng, number, hidden, ffn, dtype):
        self.xp, self.rng, self.dtype = xp, rng, dtype
        self.w_in, self.w_out = self.numbers(number, hidden, ffn), self.numbers(number, ffn, hidden)
        self.w_out /= 32

    def numbers(self, *shape):
        """Random -1, 0 and 1."""
        return self.xp.asarray(self.rng.integers(-1, 2, shape, np.int8)).astype(self.dtype)

    def one(self, e, x, out=None):
        """Expert ``e`` of some rows."""
        h = x.dot(self.w_in[e])
        return self.xp.maximum(h, 0, out=h).dot(self.w_out[e], out=out)

    def __call__(self, recv, sms=None):
        """All rows of a dispatch with ``do_expand``: they lie expert by expert.

        Args:
            recv: What it returned.
            sms: How many SMs there are for it; None: all.
        """
        y = self.xp.empty(recv.recv_x.shape, recv.recv_x.dtype)
        ends = itertools.accumulate(recv.num_recv_tokens_per_expert_list, initial=0)
        with _cublas_on(self.xp, sms):
            for e, (begin, end) in enumerate(itertools.pairwise(ends)):
                self.one(e, recv.recv_x[begin:end], out=y[begin:end])
        return y


@contextlib.contextmanager
def _cublas_on(xp, sms):
    """Let cuBLAS plan its products for so many SMs. It would count on all, and what finds no SM
    in the first round takes a second one."""
    if xp is np or sms is None:
        yield
        return
    from cuda.pathfinder import load_nvidia_dynamic_lib

    tell = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path).cublasSetSmCountTarget
    handle = ctypes.c_void_p(xp.cuda.device.get_cublas_handle())
    if tell(handle, sms):
        raise ValueError(f"cuBLAS does not plan for {sms} SMs; give --gemm-sms a number it has")
    try:
        yield
    finally:
        tell(handle, 0)


def other_sms(xp, num_sms):
    """SMs that ``num_sms`` leaves; None on the host engine."""
    if xp is np:
        return None
    return max(1, xp.cuda.Device().attributes["MultiProcessorCount"] - num_sms)


# -------------------------------------------------------------------------------- measurement


class Timeline:
    """When pieces of work begin and end: CUDA events on their streams, or the host's clock."""

    def __init__(self, xp):
        self._cuda = None if xp is np else xp.cuda
        self._marks = []
        self._zero = self._mark()

    def _mark(self, stream=None):
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event()
        event.record(stream or self._cuda.get_current_stream())
        return event

    @contextlib.contextmanager
    def piece(self, name, stream=None, after=None):
        """What is queued in the block.

        Args:
            name: What it is.
            stream: Where the block queues it; None: on the current stream.
            after: An event the stream waits for in the block. It does so before the first mark
                already, or that would say when the stream had nothing else to do.
        """
        if stream is not None and after is not None:
            with stream:
                after.current_stream_wait()
        begin = self._mark(stream)
        yield
        self._marks.append((name, begin, self._mark(stream)))

    def end(self):
        """Wait for it all. False if the GPU had begun before all was queued."""
        if self._cuda is None:
            return True
        in_time = not self._zero.done
        self._cuda.Device().synchronize()
        return in_time

    def pieces(self):
        """Name → begin and end in microseconds from the start."""
        return {name: (self._since(begin), self._since(end)) for name, begin, end in self._marks}

    def _since(self, mark):
        if self._cuda is None:
            return 1e6 * (mark - self._zero)
        return 1e3 * self._cuda.get_elapsed_time(self._zero, mark)


@dataclass
class Found:
    """Of each way the run with the median time.

    Attributes:
        pieces: Way → this rank's pieces of that run.
        totals: Way → microseconds of that run on the slowest rank.
        results: What the layer gave.
        same_bits: Whether all runs gave it.
        late: Runs that the GPU began before Python had queued them.
        on_gpus: On which engine it ran.
        where: How it was measured, in words.
        saving: How much less the second way takes, in words.
    """

    pieces: dict
    totals: dict
    results: list
    same_bits: bool
    late: int
    on_gpus: bool
    where: str
    saving: str


def measure(comm, xp, buffer, ways, args):
    """Run each way in turn. Collective.

    Args:
        comm: The ranks.
        xp: NumPy or CuPy.
        buffer: For its barrier: all ranks begin together.
        ways: Name → what queues one run of the layer, given a ``Timeline``, and returns arrays.
        args: The command line.
    """
    on_gpus, results, same_bits, late = xp is not np, None, True, 0
    done = {name: [] for name in ways}
    large = xp.ones((8192, 8192), xp.float16) if on_gpus else None
    for turn in range(WARM_UP + args.runs):
        for name, run in ways.items():
            for _ in range(HEAD_START if on_gpus else 0):
                large.dot(large)
            buffer.barrier()
            timeline = Timeline(xp)
            outs = run(timeline)
            in_time = timeline.end()
            results = results or outs
            for one, other in zip(results, outs, strict=True):
                same_bits &= bool((one.view(xp.uint8) == other.view(xp.uint8)).all())
            if turn >= WARM_UP:
                done[name].append(timeline.pieces())
                late += not in_time
    pieces, totals = {}, {}
    for name, of_runs in done.items():
        mine = [max(end for _, end in each.values()) for each in of_runs]
        slowest = np.max(comm.allgather(mine), axis=0)
        median = slowest.argsort()[args.runs // 2]
        pieces[name], totals[name] = of_runs[median], float(slowest[median])
    where = f"rank 0 of {comm.size}, median of {args.runs} runs"
    if on_gpus:
        where += f"; {_gpu_name(xp)}, overlapped: {args.num_sms} SMs for calls beside the experts, "
        where += f"{args.gemm_sms} for the experts"
    saving = _saving(*totals.values(), on_gpus)
    return Found(pieces, totals, results, same_bits, late, on_gpus, where, saving)


def _gpu_name(xp):
    return xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()


def _saving(one, two, on_gpus):
    if not on_gpus:
        return "nothing is saved: the host engine has no streams"
    word = "saved" if two <= one else "lost"
    return f"{word} {abs(one - two):,.0f} µs of {one:,.0f} µs ({100 * abs(1 - two / one):.1f} %)"


# --------------------------------------------------------------------------------- what is seen


def report(found, args):
    """Print the table and, if asked for, draw the picture."""
    one, two = found.totals
    print(f"{'µs':14}{one:>24}{two:>24}")
    for piece, (begin, end) in found.pieces[one].items():
        again = found.pieces[two][piece]
        print(f"{piece:14}{begin:12,.0f} to{end:9,.0f}{again[0]:12,.0f} to{again[1]:9,.0f}")
    print(f"{'slowest rank':14}{found.totals[one]:24,.0f}{found.totals[two]:24,.0f}")
    print(f"({found.where})")
    if found.late:
        print(
            f"note: in {found.late} of {2 * args.runs} runs the GPU began before Python had ",
            end="",
        )
        print("queued everything; gaps may be Python's")
    print(found.saving)
    if not found.on_gpus:
        print("there a call is over when it returns: the columns differ in order, and by chance")
    if args.out is not None:
        draw(args.out / "overlap.png", found)
        print(f"picture: {args.out / 'overlap.png'}")


def draw(path, found):
    """Two rows for each way, compute and communication, over the same time: a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")  # no window
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(10, 5.2), sharex=True, layout="constrained")
    longest = max(found.totals.values())
    for axes, (way, pieces) in zip(panels, found.pieces.items(), strict=True):
        for name, (begin, end) in pieces.items():
            kind, batch = name.split()
            row, color, share = int(kind == "experts"), COLORS[batch], (end - begin) / longest
            axes.barh(row, end - begin, 0.8, begin, color=color, edgecolor="white", linewidth=1.5)
            if share > 0.012:  # there is room for a letter, or for the name
                text = f"{kind}\n{batch}" if share > 0.075 else batch
                style = {"ha": "center", "va": "center", "color": "white", "fontsize": 9.5}
                axes.text((begin + end) / 2, row, text, **style)
        total = found.totals[way]
        axes.axvline(total, color="#222222", linewidth=1.2)
        axes.text(total - longest / 200, 1.7, f"{total:,.0f} µs", ha="right", va="top", fontsize=9)
        axes.set_yticks((0, 1), ("communication", "compute"))
        axes.set_ylim(-0.5, 1.7)
        axes.set_title(way, fontsize=10, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[1].set(xlabel=f"µs since all ranks began\n{found.where}", xlim=(0, 1.02 * longest))
    panels[1].xaxis.set_major_formatter("{x:,.0f}")
    panels[1].xaxis.label.set_fontsize(9)
    figure.suptitle(
        f"A mixture-of-experts layer in two micro-batches:\n{found.saving}", fontsize=12
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
