"""Compiled kernels on disk, in a folder that belongs to this user alone.

A cubin is code that runs with this process's rights, so that what is loaded must have been written
by this user: the folder has mode 0700 and the user as its owner, and nobody but the user and root
may rename or replace a folder above it, or it is not used. Digests then find the damage that disks
and killed processes do; they are no protection against anyone who can write there. What is loaded
are the bytes that were checked.

::

    <folder>/v2/                              0700, owned by us
      barrier.sm_90.<32 hex digits>/          one compile; one rename makes it appear
        barrier.cu  barrier.ptx  barrier.cubin
        entry.json                            key, SHA-256 of each file, what the compiler reported,
                                              and SHA-256 of all that

Where the folder cannot be used or written, a private temporary folder takes its place for the life
of the process, and where there is none either, memory: nothing fails, the next process compiles
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KernelCache", "Stored", "own_folder"]

_LOG = logging.getLogger(__name__)
_SCHEMA = "v2"
_ENTRY = "entry.json"
_TRIES = 8
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Stored:
    """One entry, read and verified.

    Attributes:
        folder: Where its files lie; None: nowhere.
        files: File name -> content.
        meta: What was stored beside them.
    """

    folder: Path | None
    files: Mapping[str, bytes]
    meta: Mapping[str, Any]


class KernelCache:
    """Entries of named files under a digest. Safe against other processes and killed ones.

    Args:
        folder: The user's cache folder; ``None`` for a private temporary one.
    """

    def __init__(self, folder: Path | None) -> None:
        self._private: Path | None = None
        self._root = None if folder is None else own_folder(folder)
        self._writable = self._root is not None

    @property
    def folder(self) -> Path | None:
        """Where entries are looked for first; None: no folder can be written."""
        with contextlib.suppress(OSError):
            return self._temporary() if self._root is None else self._root
        return None

    def load(self, name: str, digest: str) -> Stored | None:
        """Return the entry, or ``None`` where there is none or it is damaged."""
        for root in (self._root, self._private):
            if root is None:
                continue
            stored = _read(root / _folder_name(name, digest), digest)
            if stored is not None:
                return stored
        return None

    def store(
        self, name: str, digest: str, files: Mapping[str, bytes], meta: Mapping[str, Any]
    ) -> Stored:
        """Write an entry, in place of a damaged one if need be, and return it.

        A process that stored the same digest meanwhile wins: the two are equal. Where nothing can
        be written, the entry is in memory alone.
        """
        if self._root is not None and self._writable:
            try:
                return _write(self._root, name, digest, files, meta)
            except OSError as error:
                _LOG.warning(
                    "the kernel cache %s cannot be written (%s): kernels are compiled for this "
                    "process alone; set DEEPEP_CUPY_CACHE_DIR to a folder of yours with space",
                    self._root,
                    error,
                )
                self._writable = False
        try:
            return _write(self._temporary(), name, digest, files, meta)
        except OSError as error:
            _LOG.warning("no temporary folder either (%s): kernels are kept in memory", error)
            return Stored(None, dict(files), dict(meta))

    def discard(self, name: str, digest: str) -> None:
        """Remove an entry that holds something else than its reader needs."""
        for root in (self._root, self._private):
            if root is not None:
                shutil.rmtree(root / _folder_name(name, digest), ignore_errors=True)

    def keep_failed(self, name: str, text: str) -> Path | None:
        """Write a text that did not compile where its author can find it after this process; None
        where nothing can be written."""
        if self._root is not None and self._writable:
            with contextlib.suppress(OSError):
                folder = self._root / "failed"
                folder.mkdir(exist_ok=True)
                (folder / name).write_text(text)
                return folder / name
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="deepep_cupy-failed-")) / name
            path.write_text(text)
            return path
        return None

    def _temporary(self) -> Path:
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="deepep_cupy-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
        return self._private


def _folder_name(name: str, digest: str) -> str:
    return f"{name}.{digest[:32]}"


def own_folder(folder: Path) -> Path | None:
    """The versioned folder in ``folder``, made if need be.

    Returns:
        Its path without links; ``None``, and a warning in the log, where it is not this user's
        alone, or where somebody else may put another folder in its place.
    """
    problem, root = "", folder / _SCHEMA
    try:
        root = folder.resolve() / _SCHEMA
        _make(root)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            problem = "it is no folder (a link is not followed)"
        elif found.st_uid != os.geteuid():
            problem = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
        elif found.st_mode & _OTHERS_WRITE:
            problem = "other users may write there; remove it"
        else:
            problem = next(filter(None, map(_open_to_others, root.parents)), "")
        if not problem:
            if found.st_mode & _OTHERS:
                root.chmod(0o700)
            return root
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        problem = str(error)
    _LOG.warning(
        "the kernel cache %s is not used: %s. Kernels are compiled for this process alone; set "
        "DEEPEP_CUPY_CACHE_DIR to a folder of yours",
        root,
        problem,
    )
    return None


def _make(folder: Path) -> None:
    """Make a folder and those above it, each for this user alone."""
    if not folder.is_dir() and not folder.is_symlink():
        if folder != folder.parent:
            _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _open_to_others(folder: Path) -> str:
    """Why somebody else may replace what lies in a folder; empty: only its owner and root may.

    In a folder with the sticky bit, such as /tmp, each user can move only what is the user's own.
    """
    found = folder.lstat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{folder} above it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        return f"other users may write in {folder} above it (chmod go-w {folder})"
    return ""


def _read(folder: Path, digest: str) -> Stored | None:
    """An entry, or ``None`` (and a line in the log where something is wrong with it)."""
    try:
        entry = json.loads((folder / _ENTRY).read_bytes())
        seal = entry.pop("sha256")
        sums: dict[str, str] = entry["files"]
        files = {name: (folder / Path(name).name).read_bytes() for name in sums}
        meta = dict(entry["meta"])
        same = entry["digest"] == digest and seal == _seal(entry)
        changed = [name for name in files if hashlib.sha256(files[name]).hexdigest() != sums[name]]
    except FileNotFoundError:
        if folder.is_dir():
            _LOG.warning("the cache entry %s is incomplete: compiled again", folder)
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _LOG.warning("the cache entry %s is damaged (%r): compiled again", folder, error)
        return None
    if changed or not same:
        what = ", ".join(changed) or "its digest"
        _LOG.warning("the cache entry %s is damaged (%s): compiled again", folder, what)
        return None
    return Stored(folder, files, meta)


def _seal(entry: Mapping[str, Any]) -> str:
    """SHA-256 of an entry without its seal."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _write(
    root: Path, name: str, digest: str, files: Mapping[str, bytes], meta: Mapping[str, Any]
) -> Stored:
    final = root / _folder_name(name, digest)
    entry: dict[str, Any] = {
        "digest": digest,
        "files": {file: hashlib.sha256(content).hexdigest() for file, content in files.items()},
        "meta": dict(meta),
    }
    entry["sha256"] = _seal(entry)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    aside = root / made.name.replace(".new-", ".old-")
    try:
        for file, content in files.items():
            (made / file).write_bytes(content)
        (made / _ENTRY).write_text(json.dumps(entry, indent=1) + "\n")
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                made.rename(final)
                return Stored(final, dict(files), dict(meta))
            stored = _read(final, digest)
            if stored is not None:
                return stored
            # A damaged entry is in the way, and only an empty folder can be renamed over.
            with contextlib.suppress(FileNotFoundError):
                final.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{final} cannot be replaced")
    finally:
        shutil.rmtree(made, ignore_errors=True)
