"""Were the kernels run on GPUs since they last changed? Warns: CI has no GPU to run them on."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def last_run():
    """The module that ``.ci/gpu`` uses, from its file."""
    path = ROOT / "tests" / "gpu" / "last_run.py"
    spec = importlib.util.spec_from_file_location("last_run_of_gpu_tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("default")
def test_kernel_text_is_what_was_last_run(last_run):
    if not last_run.PATH.exists():
        warnings.warn("no run of .ci/gpu is recorded in tests/gpu/LAST_RUN.md", stacklevel=1)
        return
    page = last_run.PATH.read_text()
    assert last_run.digest_in(page), "LAST_RUN.md names no digest: let .ci/gpu write it"
    now = last_run.short(last_run.digest(ROOT))
    if last_run.digest_in(page) != now:
        warnings.warn(
            f"kernel text has changed since it was last run on GPUs (then "
            f"{last_run.digest_in(page)}, now {now}): run .ci/gpu on a machine that has some",
            stacklevel=1,
        )
    bad = [row for row in last_run.rows_in(page) if row.result == "FAILED"]
    if bad:
        warnings.warn(f"failed on GPUs when last run: {[row.part for row in bad]}", stacklevel=1)


def make_tree(root, text="// a kernel\n"):
    """A few files of those that make the digest."""
    for name, content in {
        "deepep_cupy/cuda/barrier.cu": text,
        "deepep_cupy/cuda/comm/wait.cuh": "",
        "deepep_cupy/engines/gpu/kernels.py": "",
        "deepep_cupy/protocol/constants.py": "K = 1\n",
        "ptx/peer_barrier.sm_80.ptx": ".version 8.0\n",
        "README.md": text,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(
    "name",
    [
        "deepep_cupy/cuda/barrier.cu",
        "deepep_cupy/cuda/comm/wait.cuh",
        "deepep_cupy/protocol/constants.py",
        "ptx/peer_barrier.sm_80.ptx",
    ],
)
def test_digest_sees_every_kernel_file(last_run, tmp_path, name):
    make_tree(tmp_path)
    before = last_run.digest(tmp_path)
    assert before == last_run.digest(tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write("more")
    assert last_run.digest(tmp_path) != before


def test_digest_does_not_see_comments(last_run, tmp_path):
    make_tree(tmp_path, "int a;  // one\n\n  int b;\n")
    before = last_run.digest(tmp_path)
    kernel = tmp_path / "deepep_cupy" / "cuda" / "barrier.cu"
    kernel.write_text("// other words\nint a;\nint b;\n")
    constants = tmp_path / "deepep_cupy" / "protocol" / "constants.py"
    constants.write_text('"""Words."""\n\nK = 1  # more of them\n"""And more."""\n')
    assert last_run.digest(tmp_path) == before
    kernel.write_text("int a;\nint c;\n")
    assert last_run.digest(tmp_path) != before


def test_digest_sees_new_and_renamed_files_and_nothing_else(last_run, tmp_path):
    make_tree(tmp_path)
    before = last_run.digest(tmp_path)
    (tmp_path / "README.md").write_text("other words")
    assert last_run.digest(tmp_path) == before
    folder = tmp_path / "deepep_cupy" / "cuda"
    (folder / "barrier.cu").rename(folder / "wall.cu")
    renamed = last_run.digest(tmp_path)
    assert renamed != before
    (folder / "new.cu").write_text("")
    assert last_run.digest(tmp_path) not in (before, renamed)


def test_patterns_find_this_repository(last_run):
    """A pattern that matches nothing would make the digest blind."""
    found = {pattern: list(ROOT.glob(pattern)) for pattern in last_run.FILES}
    empty = [pattern for pattern, paths in found.items() if not paths]
    assert empty in ([], ["ptx/*.ptx"])
    listed = {path for paths in found.values() for path in paths}
    cuda = ROOT / "deepep_cupy" / "cuda"
    assert {path for path in cuda.rglob("*") if path.is_file()} <= listed


def test_page_can_be_read_back_and_merged(last_run):
    def row(part, ranks="2", text="aaaa", result="ok"):
        return last_run.Row(part, ranks, "2", "1.0", result, "a | b", "2026-01-01", text)

    text = "0123456789abcdef"
    written = last_run.page([("GPU", "none")], [row("table"), row("soak")], text, "2026-01-02")
    assert last_run.digest_in(written) == text
    read = last_run.rows_in(written)
    assert [each.part for each in read] == ["table", "soak"]
    assert read[0].figure == "a / b"
    merged = last_run.merge(
        [row("table", text=text), row("table", "4", text), row("old")],
        [row("table", text=text, result="FAILED")],
    )
    assert [(each.part, each.ranks, each.result, each.text) for each in merged] == [
        ("table", "4", "ok", text),
        ("old", "2", "ok", "aaaa"),
        ("table", "2", "FAILED", text),
    ]
