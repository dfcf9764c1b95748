"""Several nodes: pretended by namespaces of this machine, or by MPICH alone where it has none."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepep_cupy import env
from ranks import cluster_flags, mpirun, run_ranks, why_no_nodes

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or "-")


def cluster(*arguments, limit_s=60):
    """Run ``deepep_cupy.testing.cluster``."""
    return subprocess.run(
        [sys.executable, "-m", "deepep_cupy.testing.cluster", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env=env.child_environment({}, HERE.parents[1]),
    )


HELLO = """
from mpi4py import MPI
here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
print(MPI.COMM_WORLD.gather((here.size, MPI.Get_processor_name())), flush=True)
"""


@pytest.mark.parametrize("flags", [[], ["--pretend"]], ids=["namespaces", "pretended"])
def test_ranks_lie_on_different_nodes(flags):
    if flags != list(cluster_flags()) and not flags:
        pytest.skip("namespaces cannot be made here")
    ranks = [mpirun(), "-n", 4, sys.executable, "-c", HELLO]
    done = cluster(*flags, "--nodes", 2, "--per-node", 2, "--", *ranks)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[(")]
    assert line.count("(2, ") == 4, line
    if not flags:
        assert [line.count(f"'node{number}'") for number in (0, 1)] == [2, 2], line


def test_the_command_ends_at_its_limit_and_its_code_is_passed_on():
    ended = cluster(*cluster_flags(), "--limit", 1, "--", "sleep", "50")
    assert (ended.returncode, ended.stderr) == (124, "cluster: ended after 1 s\n")
    assert cluster(*cluster_flags(), "--", "sh", "-c", "exit 5").returncode == 5


@pytest.mark.nodes
def test_which_nodes_ranks_can_form():
    run_ranks(HERE / "nodes_worker.py", 4, nodes=2).check()


@pytest.mark.nodes
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_contract(nodes, per_node):
    run_ranks(HERE / "contract_worker.py", nodes * per_node, nodes=nodes, limit_s=120).check()


@pytest.mark.nodes
@pytest.mark.skipif(bool(cluster_flags()), reason="needs cards: pretended nodes have none")
def test_a_cable_is_pulled_and_plugged_in_again():
    run = run_ranks(HERE / "cut_worker.py", 4, nodes=2, limit_s=60)
    run.check()
    assert all("WORKS again" in output for output in run.outputs), run


@pytest.mark.nodes
@pytest.mark.skipif(bool(cluster_flags()), reason="needs cards: pretended nodes have none")
def test_a_token_crosses_once_a_node():
    run_ranks(HERE / "bytes_worker.py", 4, nodes=2).check()


@pytest.mark.nodes
@pytest.mark.parametrize("name", ["late_rows", "late_sums"])
def test_who_is_late_on_the_way_by_another_rank_is_named(name):
    run = run_ranks(HERE / "failure_worker.py", 4, name, nodes=2)
    run.check()
    for rank in (0, 2, 3):
        first = run.outputs[rank].split("\n")[1]
        assert first.startswith("SAW PeerTimeoutError"), run
        assert "rank 1" in first, run
    assert all("WORKS again open" in output for output in run.outputs), run
