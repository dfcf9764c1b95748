"""Low-latency calls on the host engine: sequences, and what is refused."""

import re
from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).with_name("low_latency_worker.py")


def test_low_latency(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=60)
    run.check()
    done = re.findall(r"s (\w+)$", run.outputs[0], re.MULTILINE)
    assert len(done) == len(set(done)) == WORKER.read_text().count("\n@scenario\n")
