"""The whole table of cases on the host engine, bit by bit against the reference."""

from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("table_worker.py")
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Arrays that are gone leave their memory, as it is, to those that come: to get new pages cleared
takes a fifth of the time, and old bytes show what was not written."""


@pytest.mark.ranks(2)
def test_every_case_is_right(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=280, environment=KEEP_MEMORY)
    run.check()
    assert f"cases right on {num_ranks} ranks" in run.outputs[0]
