"""The README's program runs as it stands there, on either engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ranks import run_ranks

README = Path(__file__).resolve().parents[2] / "README.md"


def run_snippet(folder, num_ranks, **options):
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    script = folder / "snippet.py"
    script.write_text(snippet)
    run = run_ranks(script, num_ranks, **options)
    run.check()
    for r, output in enumerate(run.outputs):
        assert re.search(rf"^rank {r} received \d+ rows; right: True$", output, re.MULTILINE), run
    return run


def test_the_program_runs_on_numpy(num_ranks, tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    run = run_snippet(tmp_path, num_ranks, environment=hidden)
    assert "running on the host engine" in run.outputs[0], run


@pytest.mark.gpu(n=1)
def test_the_program_runs_on_cupy(num_ranks, tmp_path):
    run = run_snippet(tmp_path, num_ranks)
    assert "host engine" not in run.outputs[0], run
