"""Particles in a periodic box, one slab of it per rank: no machine learning at all.

Two discs of particles that repel each other at short range collide. ``dispatch`` with
``is_token_in_rank`` does two jobs: it moves particles that crossed into another slab, and it sends
those near a slab's left edge to the neighbour as ghosts. The neighbour computes each pair across
the edge once, and ``combine`` adds the ghosts' forces back where the particles live.

USAGE (1 to 8 ranks; the picture needs matplotlib):
    mpirun -n 4 python -m mpi4py examples/04_particles.py --plot particles.png

Expected output: the engine, a progress bar, momentum kept to about 1e-15, and
    OK: 240 particles are where one process puts them, to 4e-12 (side of the box: 24)
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI
from support import check_plot, conservation, plot_particles, progress, to_host, two_discs

from deepep_cupy import Buffer

comm = MPI.COMM_WORLD
rank, num_ranks = comm.rank, comm.size
box, reach, stiffness = 24.0, 1.0, 60.0  # a slab is never narrower than two reaches: 24 / 8 = 3
num_particles, num_steps, time_step = 240, 150, 0.015


def pairs(xp, a, b):
    """Forces of each of ``b`` on each of ``a`` ``[A, B, 2]`` and the energy of each pair."""
    d = a[:, None, :2] - b[None, :, :2]
    d -= box * xp.round(d / box)  # the nearest image in the periodic box
    r = xp.sqrt((d**2).sum(axis=2))
    near = xp.where(r > 0, xp.maximum(1 - r / reach, 0), 0)
    return (stiffness * near**2 / xp.maximum(r, 1e-12))[:, :, None] * d, stiffness / 3 * near**3


def forces(xp, buffer, state):
    """Forces on this rank's particles from all others, and this rank's share of the energy."""
    f, energy = pairs(xp, state, state)
    ghost = xp.zeros((len(state), num_ranks), bool)
    if num_ranks > 1:
        ghost[:, (rank - 1) % num_ranks] = state[:, 0] - rank * box / num_ranks < reach
    # The library: rows to the ranks a mask names; here, ghosts to the left neighbour.
    recv = buffer.dispatch(state, is_token_in_rank=ghost)
    f_ghost, energy_ghost = pairs(xp, state, recv.recv_x)
    mine, theirs = f.sum(axis=1) + f_ghost.sum(axis=1), -f_ghost.sum(axis=0)
    # The library: forces on ghosts go home and are added to what is there (the bias).
    total = buffer.combine(theirs, recv.handle, bias=mine).combined_x
    return total, float(energy.sum() / 2 + energy_ghost.sum())


def migrate(xp, buffer, state):
    """Every particle to the rank whose slab it is in: a dispatch with one destination a row."""
    owner = (state[:, 0] * num_ranks / box).astype(int).clip(0, num_ranks - 1)
    # The library: what comes in are the particles of this rank from now on.
    return buffer.dispatch(state, is_token_in_rank=owner[:, None] == xp.arange(num_ranks)).recv_x


def simulate(state, migrate, forces):
    """Velocity Verlet; yields (state, energy) before the first and after each step."""
    state = migrate(state)
    f, energy = forces(state)
    for _ in range(num_steps):
        yield state, energy
        state[:, 2:4] += time_step / 2 * f / state[:, 4:5]
        state[:, :2] = (state[:, :2] + time_step * state[:, 2:4]) % box
        state = migrate(state)
        f, energy = forces(state)
        state[:, 2:4] += time_step / 2 * f / state[:, 4:5]
    yield state, energy


def main() -> int:
    """Simulate on all ranks, then alone, compare and draw; 0 when the particles agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE.png", help="draw three moments and the errors")
    args = parser.parse_args()
    check_plot(args.plot, speaks=rank == 0)
    start, history = two_discs(num_particles), []
    sizes = {"num_max_tokens_per_rank": num_particles, "hidden": start.shape[1], "num_topk": 0}
    with Buffer(comm, **sizes, dtype="float64") as buffer:
        xp = buffer.xp  # NumPy or, on GPUs, CuPy
        run = simulate(
            xp.asarray(start[rank::num_ranks].copy()),  # any share: the first migrate sorts them
            lambda state: migrate(xp, buffer, state),
            lambda state: forces(xp, buffer, state),
        )
        for state, energy in progress(run, "moving", num_steps + 1, shown=rank == 0):
            history.append(comm.gather((to_host(state).copy(), energy)))
    if rank == 0:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        print(f"engine: {buffer.engine_name}, {ranks}, {num_particles} particles")
        good = judge(start, history, args.plot)
    return 0 if comm.bcast(good if rank == 0 else None) else 1


def judge(start, history, plot):
    """True when momentum is kept and every particle is where one process puts it."""
    energy, momentum = conservation(history)
    if plot:
        moments = [(i * time_step, [s for s, _ in history[i]]) for i in (0, 50, num_steps)]
        errors = np.arange(num_steps + 1) * time_step, energy, momentum
        plot_particles(plot, moments, errors, box, reach)

    def all_forces(state):
        f, potential = pairs(np, state, state)
        return f.sum(axis=1), float(potential.sum() / 2)

    *_, (alone, _) = simulate(start, lambda state: state, all_forces)
    found = np.concatenate([state for state, _ in history[-1]])
    found = found[found[:, 5].argsort()]
    distance = found - alone if found.shape == alone.shape else np.array([np.inf])
    error = abs(distance - box * np.round(distance / box)).max()
    good = bool(error < 1e-8 and momentum.max() < 1e-12)
    print(f"momentum kept to {momentum.max():.0e}, energy to {energy.max():.0e}")
    print("OK:" if good else "WRONG:", f"{num_particles} particles are where one process", end=" ")
    print(f"puts them, to {error:.0e} (side of the box: {box:g})")
    return good


if __name__ == "__main__":
    sys.exit(main())
