"""What a bench shows: table, notes, JSON, pictures; options; and whole runs without a GPU."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ranks as start
from deepep_cupy.bench import options as bench_options
from deepep_cupy.bench import plots
from deepep_cupy.bench import report as bench_output
from deepep_cupy.bench.measure import Measurement, Meter
from deepep_cupy.bench.modes import parse, parse_any
from deepep_cupy.bench.report import BenchReport, heading, plot, table
from deepep_cupy.bench.workload import Shape
from deepep_cupy.cli import main
from deepep_cupy.errors import ContractError, PlatformError

WORKER = Path(__file__).with_name("bench_worker.py")
SMALL = ("--hidden", "64", "--experts", "16", "--dtype", "float32", "--repeats", "2")


class Ranks:
    """Two ranks on two GPUs, seen from rank 0; no communicator is needed for words."""

    def __init__(self, *, gpu=True, rank=0):
        self.gpu, self.rank, self.size = gpu, rank, 2
        self.engine, self.gpus = ("cuda" if gpu else "host"), ("a", "b")


def row(what="cached", kind="call", **changes):
    values = {"operation": "dispatch", "num_sms": 24, "num_tokens": 4096, "us": 182.25,
              "wire_bytes": 58_720_256, "logical_bytes": 117_440_512}  # fmt: skip
    return Measurement(what=what, kind=kind, **(values | changes))


ROWS = [
    row("ceiling: push", "ceiling", us=174.0, logical_bytes=0),
    row(graph_us=179.5, host_us=14.0, floor_us=174.0),
    row("uncached", us=190.0, host_us=1200.0, floor_us=174.0),
    row("NCCL: pack, send/recv", "baseline", num_sms=None, us=301.0, floor_us=174.0),
]


# --------------------------------------------------------------------------------------- table


def test_table():
    lines = table(ROWS).splitlines()
    assert lines[0].split("  ")[0] == "SMs"
    head = ["SMs", "what", "µs", "graph µs", "host µs", "wire MB", "wire GB/s", "logical GB/s"]
    assert [name for name in head if name not in lines[0]] == []
    cells = [re.split(" {2,}", line.strip()) for line in lines]
    assert len({len(line) for line in lines}) == 1, "numbers are flush right"
    assert cells[1][1:4] == ["ceiling: push", "174.0", "-"]
    assert cells[2][1:5] == ["cached", "182.2", "179.5", "14.0"]
    assert cells[2][5:] == ["58.7", "322.2", "644.4", "174.0", "0.955"]
    assert cells[4][:2] == ["-", "NCCL: pack, send/recv"]


def test_columns_without_a_word_are_left_out():
    text = table([row(num_sms=None, wire_bytes=0)])
    assert text.splitlines()[0].split() == ["what", "µs", "logical", "GB/s"]


def test_few_tokens_are_about_time():
    text = table([row(num_tokens=1, us=9.876, graph_us=7.5), row(num_tokens=2, us=1234.5)])
    assert text.splitlines()[0].split() == ["T", "SMs", "what", "µs", "graph", "µs"]
    assert text.splitlines()[1].split() == ["1", "24", "dispatch", "cached", "9.88", "7.50"]
    assert text.splitlines()[2].split()[-2:] == ["1234", "-"]


def test_heading():
    assert heading("dispatch", Shape(), Ranks(), "4096") == (
        "bench dispatch: 4096 tokens a rank, rows of 7168 bfloat16 (14336 bytes), top-8 of 256 "
        "experts, uniform; 2 ranks on 2 GPUs, engine cuda"
    )
    skewed = heading("combine", Shape(routing="k-hot", num_experts=255), Ranks(gpu=False), "1")
    assert "top-8 of 256 experts, k-hot (8 experts); 2 ranks, engine host" in skewed


def test_report():
    report = BenchReport("dispatch", Shape(), Ranks(), 20)
    report.rows += [*ROWS, row("no_wait", note="no graph: RuntimeError")]
    report.note("NCCL is not installed")
    report.note("NCCL is not installed")
    lines = report.text().splitlines()
    assert lines[0].startswith("bench dispatch: 4096 tokens")
    assert lines[-2:] == ["NCCL is not installed", "dispatch no_wait: no graph: RuntimeError"]
    assert "median of 20" in lines[-3]
    assert "host engine: times by the host's clock alone" in BenchReport(
        "dispatch", Shape(), Ranks(gpu=False), 20
    ).text()  # fmt: skip


def test_json(tmp_path, capsys):
    report = BenchReport("dispatch", Shape(num_experts=255), Ranks(gpu=False), 20)
    report.rows += ROWS
    report.publish(tmp_path / "x.json", None)
    read = json.loads((tmp_path / "x.json").read_text())
    assert read["command"] == "bench dispatch"
    assert read["settings"]["num_experts"] == 256
    assert read["machine"]["packages"]["numpy"]
    assert len(read["rows"]) == 4
    assert read["rows"][1]["ratio"] == pytest.approx(174 / 182.25)
    assert read["rows"][1]["wire_gb_s"] == pytest.approx(322.2, rel=1e-3)
    assert read["rows"][0]["graph_us"] is None
    assert "cached" in capsys.readouterr().out


def test_only_rank_0_speaks(tmp_path, capsys):
    report = BenchReport("dispatch", Shape(), Ranks(rank=1), 20)
    report.rows += ROWS
    report.publish(tmp_path / "x.json", tmp_path / "x.png")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [*ROWS, row(num_sms=64, us=180.0), row("uncached", num_sms=64)],
        [row(num_tokens=t, us=9.0 + t, graph_us=7.0) for t in (1, 2, 4)],
        [row(num_sms=None)],
    ],
    ids=["one number of SMs", "two", "tokens", "host"],
)
def test_pictures(rows, tmp_path):
    pytest.importorskip("matplotlib")
    plot(rows, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_number_of_the_longest_bar_is_inside_the_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    figure = plots.new_figure
    monkeypatch.setattr(
        bench_output, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[0]
    )
    plot([row(num_sms=None, us=123456.0), *ROWS[:1]], "title", tmp_path / "x.png")
    (axes,) = drawn[0].axes
    ends = [text.get_window_extent().x1 for text in axes.texts]
    assert len(ends) == 2
    assert max(ends) <= axes.get_window_extent().x1


# ------------------------------------------------------------------------------------- options


def options(*words):
    parser = argparse.ArgumentParser()
    bench_options.add_common(parser)
    return parser.parse_args(words)


def test_numbers():
    assert bench_options.numbers("8,16,8") == [8, 16]
    for text in ("0", "-3", "x", ""):
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            bench_options.numbers(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--topk", "33"), "--topk must be at most 32, got 33"),
        (("--topk", "4", "--experts", "3"), "--topk must be at most 3"),
        (("--hot", "7", "--routing", "k-hot"), "--hot must be 8 to 256"),
        (("--hot", "9"), "--hot is for --routing k-hot, got --routing uniform"),
        (("--exponent", "nan"), "--exponent must be 0 to 20, got nan"),
        (("--timeout", "-1"), "--timeout must be a positive number of seconds, got -1"),
        (("--json", "/tmp"), "--json must name a file in a folder that exists, got /tmp"),
        (("--plot", "x.foo"), "--plot must end with .png or .pdf or .svg, got x.foo"),
        (("--seed", "-1"), "--seed must be 0 or more"),
        (("--json", "/nowhere/at/all.json"), "--json must name a file in a folder that exists"),
    ],
)
def test_options_are_checked_before_anything_runs(words, said):
    with pytest.raises(ContractError, match=said):
        bench_options.check_common("dispatch", options(*words))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (np.zeros((2, 3), np.int64), r"must hold integers \[ranks, tokens, choices\], got int64"),
        (np.zeros((2, 3, 4)), "must hold integers .*, got float64"),
        (np.full((2, 3, 4), 256), "must hold experts from -1 to 255 .*, got 256 to 256"),
        (np.zeros((2, 0, 4), int), "must hold a choice"),
        (None, "cannot be read as a .npy file"),
    ],
)
def test_choices_of_a_file_are_checked(choices, said, tmp_path):
    path = tmp_path / "x.npy"
    if choices is not None:
        np.save(path, choices)
    with pytest.raises(ContractError, match=f"argument --routing: .*x.npy {said}"):
        bench_options.check_common("dispatch", options("--routing", str(path)))


def test_tokens_and_choices_of_a_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((2, 100, 4), np.uint16))
    args = options("--routing", str(path))
    bench_options.check_common("dispatch", args)
    args.tokens = None
    of = bench_options.tokens_of
    assert of("dispatch", args, [4096], 2) == [100]
    assert of("latency", args, [1, 64, 128], 2) == [1, 64]
    shape = bench_options.shape_of(args, [100])
    assert (shape.num_topk, shape.choices.shape) == (4, (2, 100, 4))
    with pytest.raises(ContractError, match="choices of 3 ranks, got those of 2"):
        of("dispatch", args, [4096], 3)
    args.tokens = [7, 101]
    with pytest.raises(ContractError, match=r"--tokens must be at most 100, .* got 101"):
        of("dispatch", args, [4096], 2)


def test_counts_of_ranks():
    assert bench_options.counts("7,0,7") == [7, 0, 7]
    for text in ("0", "0,0", "-1,2", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench_options.counts(text)


def test_faster_than_the_bare_copy_is_said_and_not_divided():
    report = BenchReport("dispatch", Shape(), Ranks(), 20)
    report.rows += [row(us=100.0, floor_us=117.0), row("uncached", us=100.0, floor_us=100.4)]
    text = report.text()
    assert "1.17" not in text
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["-", "1.00"]
    assert "faster than the bare copy" in text
    other = BenchReport("dispatch", Shape(), Ranks(), 20)
    other.rows += report.rows[1:]
    assert "faster than the bare copy" not in other.text()


def test_a_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match="--plot needs matplotlib"):
        bench_options.check_common("dispatch", options("--plot", "x.png"))


def test_modes_by_name():
    modes = bench_options.modes_of_names("latency", "pool,cached,pool", parse_any)
    assert modes == [parse("combine", "pool"), parse("dispatch", "cached")]
    with pytest.raises(ContractError, match="argument --mode: dispatch has the modes uncached"):
        bench_options.modes_of_names("latency", "warm", parse_any)


@pytest.mark.parametrize("verb", ["dispatch", "combine", "roundtrip", "latency"])
def test_help(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", verb, "--help"])
    assert ended.value.code == 0
    assert "--routing" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- clocks


def test_a_failed_capture_is_told_and_not_replayed(monkeypatch):
    class Timer:
        def capture(self, call, **options):
            raise RuntimeError("cannot be captured")

    class Comm:
        def allgather(self, value):
            return [value, ""]

    meter = Meter.__new__(Meter)
    meter._timer, meter._ranks, meter._repeats = Timer(), argparse.Namespace(comm=Comm()), 3
    monkeypatch.setattr(sys.modules[Meter.__module__], "CudaTimer", Timer)
    assert meter.graph(None, None, 20) == (0.0, "no graph: cannot be captured")


def test_the_bar_counts_steps(monkeypatch):
    seen = []

    class Bar:
        def __init__(self, total, shown):
            seen.append((total, shown))

        def update(self, done, what):
            seen.append((done, what))

        def clear(self):
            seen.append("clear")

    monkeypatch.setattr(bench_output, "Progress", Bar)
    steps = bench_output.Steps(2, shown=True)
    steps("a")
    steps("b")
    steps.clear()
    assert seen == [(2, True), (0, "a"), (1, "b"), "clear"]


# ------------------------------------------------------------------------------------ whole runs


@pytest.mark.mpi
@pytest.mark.parametrize("verb", ["dispatch", "combine", "roundtrip", "latency"])
def test_on_the_host_engine(verb, tmp_path):
    out = tmp_path / "x.json"
    tokens = ["--tokens", "1,3" if verb == "latency" else "40"]
    if verb == "roundtrip":  # choices of a file, some of them none
        np.save(tmp_path / "x.npy", np.arange(-1, 14, dtype=np.int32).reshape(1, 5, 3))
        tokens = ["--routing", tmp_path / "x.npy"]
    arguments = ["bench", verb, *tokens, *SMALL, "--engine", "host", "--json", out]
    done = subprocess.run(
        [sys.executable, "-m", "deepep_cupy", *map(str, arguments)],
        cwd=WORKER.parents[2], capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "host engine: times by the host's clock alone" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert {each["kind"] for each in rows} == {"call"}
    assert all(each["us"] > 0 and each["graph_us"] is None for each in rows)
    if verb == "roundtrip":
        assert {each["num_tokens"] for each in rows} == {5}
        assert "5 tokens a rank" in done.stdout
        assert "top-3 of 16" in done.stdout


def run(ranks, *arguments):
    done = start.run_ranks(WORKER, ranks, *arguments, *SMALL, limit_s=100)
    done.check()
    return done.outputs


@pytest.mark.mpi
def test_dispatch_as_on_two_gpus(tmp_path):
    out = tmp_path / "x.json"
    said = run(2, 2, "dispatch", "--tokens", 40, "--sms", "8,200", "--json", out)
    assert "2 ranks on 2 GPUs" in said[0]
    assert said[1].splitlines()[0].startswith("exit code 0")
    rows = json.loads(out.read_text())["rows"]
    assert sorted({each["num_sms"] for each in rows if each["kind"] == "call"}) == [8, 132]
    found = {(each["num_sms"], each["what"]): each for each in rows}
    for sms in (8, 132):
        for name in ("push", "pull", "local", "push, rows of 68 B"):
            assert found[sms, f"ceiling: {name}"]["us"] > 0
        for name in ("no_wait", "uncached", "cached", "cached+fp8", "cached+cast"):
            call = found[sms, name]
            assert call["floor_us"] > 0
            assert (call["graph_us"] is None) == (name == "uncached")
            assert call["host_us"] > 0
    push, call = found[8, "ceiling: push"], found[8, "cached"]
    assert call["wire_bytes"] == push["wire_bytes"]
    assert call["floor_us"] == pytest.approx(push["us"])
    assert found[None, "NCCL: pack, send/recv"]["wire_bytes"] == call["wire_bytes"]


RUNS = {  # ranks, GPUs, command line: words on rank 0
    (3, 3, "combine --tokens 20,7,0 --sms 8"): [
        *("20,7,0 tokens a rank", "pool+per_rank", "ceiling: pull", "recv, scatter"),
        *("ceiling: local, all SMs", "outside+weights", "pool+bias", "pool+expand"),
    ],
    (4, 2, "combine --tokens 20 --sms 8,200 --mode pool,outside"): [
        *("4 ranks on 2 GPUs", "ceiling: push", "NCCL does not put two ranks on one GPU"),
        *("\n 66  ", "200 SMs: a rank gets no more than 66"),
    ],
    (2, 1, "dispatch --tokens 20 --sms 8 --mode cached"): ["on 1 GPU,", "ceiling: local"],
    (1, 1, "roundtrip --tokens 20 --sms 8"): ["on 1 GPU,", "NCCL has nothing to do on one rank"],
    (2, 2, "roundtrip --tokens 20 --sms 8 --routing k-hot"): [
        *("ceiling: push there", "ceiling: pull back", "scatter"),
    ],
    (2, 2, "tune --tokens 20 --few 4 --blocks 8,16 --dry-run"): [
        *("bench tune: 20 tokens", "\n  8  no_wait", "\n 16  pool", "4 tokens, at least 8 a block"),
        *("best: ", "tokens a block of a dispatch"),
    ],
    (2, 2, "latency --tokens 1,4 --routing zipf --busy 2"): [
        *("dispatch no_wait", "combine pool", "graph", "host min", "behind 2 x 256 MB"),
    ],
}


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_gpus_line", RUNS, ids=lambda key: key[2].split()[0])
def test_other_runs_as_on_gpus(ranks_gpus_line):
    ranks, gpus, line = ranks_gpus_line
    words, arguments = RUNS[ranks_gpus_line], line.split()
    said = run(ranks, gpus, *arguments)
    missing = [word for word in words if word not in said[0]]
    assert not missing, f"{missing} not in:\n{said[0]}"
    if gpus == 1:
        assert "ceiling: push" not in said[0]
    for other in said[1:]:
        assert len(other.splitlines()) == 1, other


@pytest.mark.mpi
def test_a_wrong_copy_is_found():
    done = start.run_ranks(
        WORKER, 2, 2, "dispatch", "--tokens", 20, "--sms", "8", *SMALL, limit_s=100,
        environment={"BENCH_WORKER_FAULT": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "wrong bytes on the ranks; no time of this run means anything" in done.outputs[0]
