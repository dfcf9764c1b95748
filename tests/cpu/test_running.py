"""How the tests are run: a folder that tested nothing fails the run, also with several workers."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [[]]
if importlib.util.find_spec("xdist"):
    OPTIONS.append(["-n", "2"])


def run(folder, *arguments):
    """pytest where no C++ compiler is found, so that every test of ``tests/sim`` is skipped."""
    for program in ("git", "python3"):
        (folder / program).symlink_to(shutil.which(program))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["one", "two at a time"][: len(OPTIONS)])
def test_a_folder_whose_tests_were_all_skipped_fails_the_run(options, tmp_path):
    files = ["tests/sim/test_staging.py", "tests/sim/test_syntax.py", "tests/cpu/test_env.py"]
    child = run(tmp_path, *options, *files)
    assert child.returncode == 1, child.stdout + child.stderr
    assert "FAILED tests/sim: all " in child.stdout
    assert "g++ is not on PATH" in child.stdout
    assert "FAILED tests/cpu" not in child.stdout
