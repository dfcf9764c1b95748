"""What the examples need besides the library: data, an optimizer, pictures."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

RANK_COLORS = ("#47a", "#e67", "#283", "#cb4", "#6ce", "#a37", "#d84", "#777")


def to_host(array):
    """A NumPy array of an array of either engine."""
    return array.get() if hasattr(array, "get") else array


def progress(steps, what, total, *, shown):
    """``steps`` behind a bar of tqdm, where that is installed and this rank shows one."""
    try:
        from tqdm import tqdm
    except ImportError:
        return Steps(steps)
    return tqdm(steps, what, total, disable=not shown, mininterval=0.5)


class Steps:
    """Steps without a bar."""

    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        return iter(self.steps)

    def set_postfix(self, **values):
        """Stand for the method of tqdm."""


def check_plot(path, *, speaks):
    """End at once where a picture is wanted and cannot be drawn, not after the work is done."""
    if path and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install matplotlib" if speaks else 1)


def load_digits(num_train):
    """1797 images of 8 x 8 pixels, shuffled: train and test, pixels and labels.

    digits.npz holds the test part of the "Optical Recognition of Handwritten Digits" of E. Alpaydin
    and C. Kaynak, UCI Machine Learning Repository (CC BY 4.0), as scikit-learn has it too.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        pixels, labels = digits["pixels"].astype(float), digits["labels"].astype(int)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = pixels[order] / 16, labels[order]
    return (x[:num_train], y[:num_train]), (x[num_train:], y[num_train:])


def random_matrices(xp, dtype, **shapes):
    """Starting values of parameters, the same on every rank."""
    rng = np.random.default_rng(2)
    values = {n: rng.standard_normal(s) * (2 / s[-2]) ** 0.5 for n, s in shapes.items()}
    return {name: xp.asarray(value, dtype) for name, value in values.items()}


class Adam:
    """The usual optimizer on a dictionary of arrays, in place."""

    def __init__(self, xp, parameters, rate):
        self.xp, self.p, self.rate, self.step = xp, parameters, rate, 0
        self.m = {name: xp.zeros_like(value) for name, value in parameters.items()}
        self.v = {name: xp.zeros_like(value) for name, value in parameters.items()}

    def update(self, grad):
        """One step down the gradient."""
        self.step += 1
        rate = self.rate * (1 - 0.99**self.step) ** 0.5 / (1 - 0.9**self.step)
        for name, p in self.p.items():
            self.m[name] += 0.1 * (grad[name] - self.m[name])
            self.v[name] += 0.01 * (grad[name] ** 2 - self.v[name])
            p -= rate * self.m[name] / (self.xp.sqrt(self.v[name]) + 1e-8)


def two_discs(number):
    """Rows of x, y, velocity, mass and number: a light disc and a heavy one, about to collide."""
    n = np.arange(number // 2)
    radius, angle = 0.38 * np.sqrt(n + 0.5), n * np.pi * (3 - 5**0.5)  # a sunflower
    discs = []
    for which, (x, y, speed, mass) in enumerate([(5.5, 12.8, 2.5, 1.0), (18.5, 11.2, -2.0, 3.0)]):
        columns = (x + radius * np.cos(angle), y + radius * np.sin(angle), speed, 0.2, mass)
        discs.append(np.stack([c + 0.0 * n for c in (*columns, n + which * len(n))], axis=1))
    return np.concatenate(discs)


def conservation(history):
    """Relative changes of total energy and momentum; per step one (state, potential) a rank."""
    every = [np.concatenate([state for state, _ in ranks]) for ranks in history]
    energy = np.array([sum(potential for _, potential in ranks) for ranks in history])
    energy += [(s[:, 2:4] ** 2 * s[:, 4:5]).sum() / 2 for s in every]
    momentum = np.array([(s[:, 2:4] * s[:, 4:5]).sum(axis=0) for s in every])
    scale = abs(every[0][:, 2:4] * every[0][:, 4:5]).sum()
    return abs(energy / energy[0] - 1), abs(momentum - momentum[0]).max(axis=1) / scale


def plot_training(path, losses, loads, num_ranks):
    """Loss and rows per expert (``loads``: one row a step) as a PNG."""
    plt = _pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    steps, loads = np.arange(1, len(losses) + 1), np.asarray(loads)
    top.semilogy(steps, losses, color="#222222", linewidth=1)
    top.set_ylabel("cross-entropy of the batch (nats)")
    top.set_title(f"Digits: mixture of {loads.shape[1]} experts trained on {num_ranks} ranks")
    per_rank = loads.shape[1] // num_ranks
    colors = [RANK_COLORS[e // per_rank] for e in range(loads.shape[1])]
    labels = [f"expert {e} (rank {e // per_rank})" for e in range(loads.shape[1])]
    window = np.convolve(np.ones(len(steps)), np.ones(8), "same")
    smooth = np.apply_along_axis(np.convolve, 0, loads, np.ones(8), "same").T / window
    bottom.stackplot(steps, smooth, colors=colors, labels=labels, edgecolor="white")
    bottom.set_xlabel("step")
    bottom.set_ylabel("rows received per step\n(mean of 8 steps)")
    bottom.margins(0)
    bottom.set_xlim(1, len(losses))
    handles, names = bottom.get_legend_handles_labels()
    bottom.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_particles(path, snapshots, errors, box, reach):
    """Three moments of the box and how well energy and momentum were kept, as a PNG.

    Args:
        path: Where to write.
        snapshots: Three of (time, rows of x, y, … one array a rank).
        errors: Times, relative change of the energy, relative change of the momentum.
        box: Side of the periodic box.
        reach: Range of the force.
    """
    plt = _pyplot()
    figure = plt.figure(figsize=(11, 6.2), layout="constrained")
    figure.suptitle(
        f"Two discs collide: one slab of the box on each of {len(snapshots[0][1])} ranks"
    )
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 1))
    for column, (time, ranks) in enumerate(snapshots):
        axes = figure.add_subplot(grid[0, column])
        num_ranks = len(ranks)
        for rank, state in enumerate(ranks):
            color = RANK_COLORS[rank]
            axes.scatter(state[:, 0], state[:, 1], s=5, color=color, label=f"rank {rank}")
            ghost = state[:, 0] - rank * box / num_ranks < (reach if num_ranks > 1 else 0)
            axes.scatter(*state[ghost, :2].T, s=22, facecolors="none", edgecolors=color)
            axes.axvline(rank * box / num_ranks, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set(xlim=(0, box), ylim=(0, box), aspect="equal", title=f"time {time:.1f}")
        axes.set(xlabel="x / reach", ylabel="y / reach" if column == 0 else "")
    axes.scatter(
        [],
        [],
        s=22,
        facecolors="none",
        edgecolors="#444444",
        label="also a ghost\non the rank to the left",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    axes = figure.add_subplot(grid[1, :])
    times, energy, momentum = errors
    axes.semilogy(times[1:], energy[1:] + 1e-18, color=RANK_COLORS[0], label="energy")
    axes.semilogy(times[1:], momentum[1:] + 1e-18, color=RANK_COLORS[1], label="momentum")
    axes.set(xlabel="time", ylabel="relative change", xlim=(0, times[-1]))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot():
    import matplotlib as mpl

    mpl.use("Agg")  # no window
    import matplotlib.pyplot as plt

    return plt
