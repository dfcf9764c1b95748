"""Which experts the tokens of a bench choose: evenly, by Zipf's law, all the same few, or as a file
says.

In every pattern each token has K experts, all different from each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUTINGS", "choose", "read_choices"]

ROUTINGS = ("uniform", "zipf", "k-hot")
_KEYS_AT_ONCE = 1 << 22


def choose(
    routing: str,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    rng: np.random.Generator,
    *,
    exponent: float = 1.0,
    num_hot: int | None = None,
) -> NDArray[np.int64]:
    """``[T, K]`` experts, each row in random order.

    ``uniform``: every expert is as likely as any other. ``zipf``: expert e is chosen in proportion
    to 1 / (e + 1) ** ``exponent``, so that the popular ones lie on the low ranks. ``k-hot``: only
    the first ``num_hot`` experts are ever chosen, all of them on rank 0 where it has so many: the
    worst there is.

    Args:
        routing: One of ``ROUTINGS``.
        num_tokens: T.
        num_topk: K, at most ``num_experts``.
        num_experts: E.
        rng: The source of random numbers.
        exponent: Of Zipf's law.
        num_hot: Experts of ``k-hot``, K to E of them; None: K.

    Raises:
        ValueError: There is no such pattern, or it has fewer than K experts.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"choose(): routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    eligible = num_experts
    if routing == "k-hot":
        eligible = num_topk if num_hot is None else num_hot
    if not num_topk <= eligible <= num_experts:
        raise ValueError(
            f"choose(): {routing} takes {num_topk} to {num_experts} experts, got {eligible}"
        )
    weights: Any = 1.0
    if routing == "zipf":
        weights = (1.0 + np.arange(eligible)) ** -exponent
    chosen = np.empty((num_tokens, num_topk), np.int64)
    step = max(1, _KEYS_AT_ONCE // max(1, eligible))
    for begin in range(0, num_tokens, step):
        part = chosen[begin : begin + step]
        part[...] = _race(rng, len(part), num_topk, eligible, weights)
    return chosen


def read_choices(path: Path, num_experts: int) -> NDArray[np.int64]:
    """``[R, T, K]`` of a ``.npy`` file: the experts of T tokens of each of R ranks, -1 for none.

    Args:
        path: The file, of integers of any size.
        num_experts: E.

    Raises:
        ValueError: It cannot be read, or holds something else.
    """
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a .npy file ({error})") from error
    if not isinstance(found, np.ndarray) or found.ndim != 3 or found.dtype.kind not in "iu":
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "archive"
        raise ValueError(f"{path} must hold integers [ranks, tokens, choices], got {what}")
    if not all(found.shape):
        raise ValueError(f"{path} must hold a choice, got {list(found.shape)}")
    chosen = found.astype(np.int64)
    if chosen.min() < -1 or chosen.max() >= num_experts:
        raise ValueError(
            f"{path} must hold experts from -1 to {num_experts - 1} (--experts), got "
            f"{chosen.min()} to {chosen.max()}"
        )
    return chosen


def _race(
    rng: np.random.Generator, tokens: int, topk: int, experts: int, weights: Any
) -> NDArray[np.int64]:
    """The first ``topk`` to arrive, where expert e takes an exponential time of rate w_e: draws
    without replacement in proportion to the weights."""
    if topk == 0 or tokens == 0:
        return np.zeros((tokens, topk), np.int64)
    arrival = rng.standard_exponential((tokens, experts)) / weights
    first = np.argpartition(arrival, topk - 1, axis=1)[:, :topk]
    return rng.permuted(first, axis=1).astype(np.int64)
