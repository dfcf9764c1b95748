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


def test_the_first_command_is_light_and_shows_what_the_example_prints():
    text = README.read_text()
    command = re.search(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert "pip install -q -e '.[mpich]' &&" in command
    shown = re.search(r"^```text\n(deepep_cupy: .*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    run = run_ranks(README.parent / "examples" / "01_hello_roundtrip.py", 4, limit_s=60)
    run.check()
    lines = shown.splitlines()[2:]  # the lines before name the engine, and why
    assert [line for line in run.outputs[0].splitlines() if line in lines] == lines
