"""Pages: their programs run, the site's links, and the version that the changelog names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy import Buffer, __version__, env

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "ptx" / "README.md", ROOT / "README.md"])
NOT_RUN = {
    "README.md": "tests/mpi/test_readme.py runs it",
    "docs/jax.md": "pieces, not programs",
    "docs/own_kernel.md": "pieces of example 07, which runs",
}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS_GPU = re.compile(r"\bcupy\.RawModule\(|import torch|from numba")

RUN = """
import json, sys, traceback
for name, blocks in json.load(sys.stdin):
    known = {"__name__": name}
    for number, block in enumerate(blocks, 1):
        try:
            exec(compile(block, f"{name}, block {number}", "exec"), known)
        except BaseException:
            traceback.print_exc()
            sys.exit(f"FAILED: {name}, block {number}")
        print("ran", name, number)
"""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks_of(text):
    return _BLOCK.findall(text)


def needs_cupy(block):
    return bool(re.search(r"kernel_(ptx|source|options)", block))


def test_every_block_is_python():
    for path in PAGES:
        for block in blocks_of(path.read_text()):
            ast.parse(block, name_of(path))


def test_the_programs_of_all_pages_run():
    """In one process, on one rank; blocks of a page one after another, with the same names."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs MPI: mpi4py is not installed")
    has_cupy = importlib.util.find_spec("cupy") is not None
    work = []
    for path in PAGES:
        if name_of(path) in NOT_RUN:
            continue
        runs = [
            block
            for block in blocks_of(path.read_text())
            if not _NEEDS_GPU.search(block) and (has_cupy or not needs_cupy(block))
        ]
        if runs:
            work.append((name_of(path), runs))
    assert {"docs/loads_and_cache.md", "docs/several_programs.md"} <= {name for name, _ in work}
    child = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(work),
        cwd=ROOT,
        env=env.child_environment({"CUDA_VISIBLE_DEVICES": ""}, ROOT),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    ran = re.findall(r"^ran ", child.stdout, re.MULTILINE)
    assert len(ran) == sum(len(blocks) for _, blocks in work)


def test_a_page_that_is_not_run_is_there():
    assert set(NOT_RUN) <= {name_of(path) for path in PAGES}


def test_the_version_is_the_changelogs():
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert released[0] == __version__
    assert released == sorted(released, key=lambda v: [*map(int, v.split("."))], reverse=True)
    assert text.index("## [Unreleased]") < text.index(f"## [{released[0]}]")


def test_what_has_no_effect_stands_behind_what_has_one():
    arguments = inspect.getdoc(Buffer.dispatch).split("Args:\n")[1].split("Returns:\n")[0]
    named = re.findall(r"^    (\w+): (.*)$", arguments, re.MULTILINE)
    idle = ["not needed" in text for _, text in named]
    assert sum(idle) == 3
    assert idle == sorted(idle), named


# --------------------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def turn_links():
    pytest.importorskip("mkdocs", reason="needs the extra 'docs'")
    spec = importlib.util.spec_from_file_location("hook", ROOT / "scripts" / "site_pages.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook.turn_links


@pytest.mark.parametrize(
    ("source", "text", "wanted"),
    [
        ("docs/calling.md", "[a](../README.md#two-commands)", "[a](index.md#two-commands)"),
        ("docs/calling.md", "[a](loads_and_cache.md)", "[a](loads_and_cache.md)"),
        ("README.md", "[a](docs/calling.md#modes)", "[a](calling.md#modes)"),
        ("README.md", "![a](docs/pictures/digits.png)", "![a](pictures/digits.png)"),
        ("README.md", "[`f`](examples/support.py)", "`f`"),
        (
            "README.md",
            "[a](https://nowhere.invalid/x), [b](#x)",
            "[a](https://nowhere.invalid/x), [b](#x)",
        ),
        ("README.md", "```\n[a](docs/jax.md)\n```\n", "```\n[a](docs/jax.md)\n```\n"),
        ("ptx/README.md", "[a](../docs/measurements.md)", "[a](measurements.md)"),
    ],
)
def test_links_of_the_site(turn_links, source, text, wanted):
    assert turn_links(text, source) == wanted
