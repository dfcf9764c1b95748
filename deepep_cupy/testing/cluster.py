"""Several nodes on one machine, for tests: Linux namespaces joined by a switch.

    python -m deepep_cupy.testing.cluster --nodes 4 --per-node 2 -- mpirun -n 8 python program.py

Each node has a network, a host name, IPC and mounts of its own: another network card with another
address, another ``/dev/shm`` and, with ``--private``, other folders. MPI learns the nodes from its
environment, so that any ``mpirun`` of MPICH (Hydra) or Open MPI (PRRTE) below the command spreads
its ranks over them, ``--per-node`` each, in order, and finds them different hosts. The command
itself runs on the first node.

The network ends at the switch, which lies in a namespace of its own: nothing can leave it, and
192.0.2.0/24 (RFC 5737) exists nowhere else. All processes live in one PID namespace and end with
it: when the command ends, at ``--limit`` seconds, or when this process is killed.

It needs Linux, ``unshare`` and ``nsenter`` (util-linux), ``ip`` (iproute2), and root or a kernel
that lets users make namespaces. ``--probe`` says whether it works here, and if not, why (exit code
77). With ``--pretend`` it needs none of that: MPICH alone starts all ranks here, and takes them for
ranks of several hosts. There are then no cards and no cables.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepep_cupy import env

__all__ = ["CANNOT", "TIMED_OUT", "main", "why_not"]

CANNOT = 77
"""Exit code where this machine cannot make nodes."""
TIMED_OUT = 124
"""Exit code of a command that was ended at its limit."""

_NETWORK = "192.0.2"
_MAX_NODES = 16
_SPACES = ("--net", "--uts", "--ipc", "--mount")

_AGENT = """#!/bin/sh
# Stands in for ssh: [options] HOST COMMAND...; a shell on that node reads the command.
# Daemons of PRRTE disturb each other where they share a folder for what they leave there.
while [ "${1#-}" != "$1" ]; do shift; done
host=${1#*@}
shift
here=${0%%/*}
case $host in
%s
*) echo "agent: no node is called $host" >&2; exit 255 ;;
esac
mkdir -p "$here/$host"
export TMPDIR="$here/$host"
exec nsenter --target "$pid" --net --uts --ipc --mount --wdns="$PWD" -- /bin/sh -c "$*"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on its nodes; its exit code, or one of those above."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m deepep_cupy.testing.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2, help=f"1 to {_MAX_NODES}")
    parser.add_argument("--per-node", type=int, default=1, help="ranks of a node")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    parser.add_argument("--private", action="append", default=[], metavar="FOLDER",
                        help="a folder of each node's own, empty at first")  # fmt: skip
    parser.add_argument("--pretend", action="store_true", help="no namespaces: MPICH alone")
    parser.add_argument("--probe", action="store_true", help="only say whether it works here")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(given)
    if not 1 <= options.nodes <= _MAX_NODES:
        parser.error(f"--nodes must be 1 to {_MAX_NODES}")
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command and not options.probe:
        parser.error("a command is missing")
    if options.inside:
        return _inside(options)
    if options.pretend and not options.probe:
        return _pretended(options)
    if reason := why_not():
        sys.stderr.write(f"cluster: not possible here: {reason}\n")
        return CANNOT
    return 0 if options.probe else _outside(given, options.limit)


# ---------------------------------------------------------------------------------------- outside


def _entry() -> list[str]:
    """Start of a command in namespaces of its own, which end with their first process."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, *_SPACES, "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str:
    """Why nodes cannot be made here; empty where they can."""
    for program in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(program) is None:
            return f"there is no '{program}'"
    trial = (
        "ip link add br0 type bridge && ip link add port0 type veth peer name eth0 && "
        "mount -t tmpfs tmpfs /dev/shm"
    )
    command = [*_entry(), "sh", "-c", trial]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "making a namespace takes more than 20 s"
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _outside(arguments: list[str], limit: float) -> int:
    """Run this file inside, and end all of it at the limit."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", folder, *arguments]
        return _run([*_entry(), *command], env.child_environment({}, _package_folder()), limit)


def _pretended(options: argparse.Namespace) -> int:
    """Run the command with an MPICH that takes its ranks for ranks of several hosts."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        hosts = _host_file(Path(folder), options)
        told = {
            "CLUSTER_NODES": ",".join(_names(options.nodes)),
            "HYDRA_LAUNCHER": "fork",
            "HYDRA_HOST_FILE": str(hosts),
        }
        environment = env.child_environment(told, _package_folder())
        return _run(options.command, environment, options.limit)


def _run(command: list[str], environment: Mapping[str, str], limit: float) -> int:
    child = subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
    )
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"cluster: ended after {limit:g} s\n")
        return TIMED_OUT
    finally:
        signal.signal(signal.SIGTERM, ended)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # and --kill-child ends the PID namespace
            child.wait()
    return code if code >= 0 else 128 - code


def _package_folder() -> Path:
    return Path(__file__).resolve().parents[2]


def _names(nodes: int) -> list[str]:
    return [f"node{number}" for number in range(nodes)]


def _host_file(folder: Path, options: argparse.Namespace) -> Path:
    path = folder / "hydra"
    path.write_text("".join(f"{node}:{options.per_node}\n" for node in _names(options.nodes)))
    return path


# ----------------------------------------------------------------------------------------- inside


def _inside(options: argparse.Namespace) -> int:
    """Be the switch: make the nodes, and run the command on the first one."""
    names, folder = _names(options.nodes), options.inside
    hosts = folder / "hosts"
    lines = [f"{_NETWORK}.{number + 1} {node}" for number, node in enumerate(names)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    prte = folder / "prte"
    prte.write_text("".join(f"{node} slots={options.per_node}\n" for node in names))
    _shell("ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
    holders = [_make_node(number, node, hosts, options) for number, node in enumerate(names)]
    agent = folder / "agent"
    cases = "\n".join(f"{node}) pid={pid} ;;" for node, pid in zip(names, holders, strict=True))
    agent.write_text(_AGENT % cases)
    agent.chmod(0o700)
    told = {
        "CLUSTER_NODES": ",".join(names),
        # MPICH: Hydra's launcher and its hosts; UCX and libfabric on the nodes' cards only.
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(agent),
        "HYDRA_HOST_FILE": str(_host_file(folder, options)),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        # Open MPI: PRRTE's launcher and hosts; plain TCP between nodes, shared memory within.
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_default_hostfile": str(prte),
        "PRTE_MCA_prte_if_include": "eth0",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,sm,self",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    enter = ["nsenter", "--target", str(holders[0]), *_SPACES, f"--wdns={Path.cwd()}", "--"]
    environment = env.child_environment(told, _package_folder())
    code = subprocess.run([*enter, *options.command], env=environment, check=False).returncode
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _make_node(number: int, node: str, hosts: Path, options: argparse.Namespace) -> int:
    """Make a node; the process that holds its namespaces, which ends with the PID namespace."""
    holder = subprocess.Popen(["unshare", *_SPACES, "sleep", "infinity"], stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not _has_left(holder.pid):
        if holder.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"cluster: the namespaces of {node} cannot be made")
        time.sleep(0.002)
    port = f"port{number}"
    _shell(
        f"ip link add {port} type veth peer name eth0 netns {holder.pid}; "
        f"ip link set {port} master br0 up"
    )
    private = "".join(
        f"mkdir -p {folder}; mount -t tmpfs tmpfs {folder}\n"
        for folder in map(shlex.quote, options.private)
    )
    inside = ["nsenter", "--target", str(holder.pid), *_SPACES, "--"]
    _shell(
        f"""
        hostname {node}
        mount -t tmpfs tmpfs /dev/shm
        mount --bind {shlex.quote(str(hosts))} /etc/hosts
        {private}
        ip link set lo up
        ip addr add {_NETWORK}.{number + 1}/24 dev eth0
        ip link set eth0 up
        """,
        *inside,
    )
    return holder.pid


def _has_left(pid: int) -> bool:
    """Whether a process is in namespaces of its own already."""
    mine, its = Path("/proc/self/ns"), Path(f"/proc/{pid}/ns")
    return all((its / kind).readlink() != (mine / kind).readlink() for kind in ("net", "mnt"))


def _shell(script: str, *prefix: str) -> None:
    """Run a few lines of shell, or raise."""
    subprocess.run([*prefix, "sh", "-ec", script], check=True, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
