"""Sequences of calls in every mode on the host engine, and what is refused in them."""

import re
from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).with_name("modes_worker.py")


def test_modes(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=120)
    run.check()
    done = re.findall(r"s (\w+)$", run.outputs[0], re.MULTILINE)
    assert len(done) == len(set(done)) == WORKER.read_text().count("\n@scenario\n")
