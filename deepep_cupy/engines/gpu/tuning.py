"""Blocks and tokens a block, as they were measured: for a GPU model, a number of ranks, how many of
them share a GPU, and a length of rows.

``python -m deepep_cupy bench tune`` measures and writes a file into the cache folder; without one
a Buffer takes what is shipped here. Only times depend on it: which block moves or adds a row
changes no bit of a result, and ranks may have different numbers of blocks.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from deepep_cupy import env
from deepep_cupy.jit.cache import own_folder

__all__ = ["SHIPPED", "Key", "Tuning", "best_blocks", "best_tokens", "load", "save", "shipped"]

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_MOST = 4096
_SLOWER = 1.03
"""Fewer blocks may take so much longer than the best number: the other SMs are free to compute."""
_ALIKE = 1.01


@dataclass(frozen=True)
class Key:
    """What figures were measured for.

    Attributes:
        gpu: Model.
        num_ranks: R.
        ranks_on_gpu: Ranks that share a GPU.
        row_bytes: Bytes of the longest row.
    """

    gpu: str
    num_ranks: int
    ranks_on_gpu: int
    row_bytes: int


@dataclass(frozen=True)
class Tuning:
    """How operations are spread over SMs.

    Attributes:
        blocks: Of an operation of many tokens, where the caller asks for no number; 0: a share of
            the SMs.
        dispatch_tokens: Tokens that a block of a dispatch has at least, where there are few.
        combine_tokens: Those of a combine.
    """

    blocks: int = 0
    dispatch_tokens: int = 1
    combine_tokens: int = 1


SHIPPED: dict[str, Tuning] = {"NVIDIA H200": Tuning(blocks=21)}
"""GPU model → figures, whatever the ranks and rows. 4096 tokens of 14336 bytes on two H200: with 21
blocks dispatch, a cached one that casts and combine took 187, 103 and 192 µs, with 16 184, 118 and
191, with 64 184, 102 and 192. Few tokens took 1 to 3 µs less with one token a block than with 4 to
8."""


def shipped(gpu: str) -> Tuning:
    """The figures that come with the package."""
    return SHIPPED.get(gpu, Tuning())


def load(key: Key, folder: Path | None = None) -> Tuning:
    """What was measured for these ranks and rows; shipped figures where nothing was, or where the
    file is damaged.

    Args:
        key: The ranks and rows.
        folder: Cache folder, None: the user's.
    """
    path = _path(key, folder)
    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
    except OSError:
        text = ""
    if not text:
        return shipped(key.gpu)
    try:
        return _checked(json.loads(text), key)
    except (ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not used: %s; bench tune writes it anew", path, error)
        return shipped(key.gpu)


def save(key: Key, tuning: Tuning, folder: Path | None = None) -> Path | None:
    """Write it where ``load`` looks; the file, or None where that cannot be written."""
    path = _path(key, folder)
    if path is None:
        return None
    made = path.with_suffix(f".{os.getpid():x}.tmp")
    content = {"format": _FORMAT, **asdict(key), **asdict(tuning)}
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        made.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        made.replace(path)
    except OSError as error:
        _LOG.warning("figures of bench tune cannot be kept: %s", error)
        return None
    return path


def _path(key: Key, folder: Path | None) -> Path | None:
    root = own_folder(env.cache_dir() if folder is None else folder)
    if root is None:
        return None
    model = re.sub(r"[^A-Za-z0-9.]+", "-", key.gpu).strip("-.") or "unknown"
    ranks = f"{key.num_ranks}ranks.{key.ranks_on_gpu}on1"
    return root / "tuning" / f"{model}.{ranks}.{key.row_bytes}bytes.json"


def _checked(stored: object, key: Key) -> Tuning:
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        raise ValueError("it is of another format")
    for name, wanted in asdict(key).items():
        if stored[name] != wanted:
            raise ValueError(f"{name} is {stored[name]!r}, not {wanted!r}")
    figures = {field.name: stored[field.name] for field in fields(Tuning)}
    for name, value in figures.items():
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}, not a number from 1 to {_MOST}")
    return Tuning(**figures)


# -------------------------------------------------------------------------------------- choice


def best_blocks(times: Mapping[int, Sequence[float]]) -> int:
    """The fewest blocks that leave every operation within 3 % of its least time; where there are
    none, those whose worst operation is the least slower.

    Args:
        times: Blocks → time of each operation, in one order.
    """
    least = [min(column) for column in zip(*times.values(), strict=True)]
    slower = {
        blocks: max(time / best for time, best in zip(row, least, strict=True))
        for blocks, row in times.items()
    }
    near = [blocks for blocks, ratio in slower.items() if ratio <= _SLOWER]
    return min(near) if near else min(slower, key=lambda blocks: (slower[blocks], blocks))


def best_tokens(times: Mapping[int, float]) -> int:
    """The most tokens a block that take no longer, within 1 %, than any other number."""
    least = min(times.values())
    return max(tokens for tokens, time in times.items() if time <= _ALIKE * least)
