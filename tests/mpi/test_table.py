"""The whole table of cases on the host engine, bit by bit against the reference."""

from pathlib import Path

from deepep_cupy.testing.ranks import run_ranks

WORKER = Path(__file__).with_name("table_worker.py")


def test_every_case_is_right(num_ranks):
    run = run_ranks(WORKER, num_ranks, limit_s=280)
    run.check()
    assert f"cases right on {num_ranks} ranks" in run.outputs[0]
