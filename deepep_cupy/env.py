"""Environment variables: one table, and the only place that reads ``os.environ``.

Values are read when they are needed, never at import, so a test or a script may set them late.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy.errors import ContractError

__all__ = [
    "VARIABLES",
    "Variable",
    "assert_cached",
    "cache_dir",
    "child_environment",
    "launcher_local_rank",
    "launcher_rank",
    "launcher_size",
    "loads",
    "log_level",
    "path",
    "ranks_per_node",
    "read",
    "setting",
]


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        default: The text used where it is unset or empty.
        doc: One sentence.
        choices: The legal texts; empty where any text is legal.
    """

    name: str
    default: str
    doc: str
    choices: tuple[str, ...] = ()


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "DEEPEP_CUPY_LOADS",
        "auto",
        "Load instruction of row data in kernels: nc (non-coherent where the policy table allows "
        "it), coherent (never), auto (the policy table).",
        ("auto", "nc", "coherent"),
    ),
    Variable(
        "DEEPEP_CUPY_PATH",
        "auto",
        "Copy path of the CUDA kernels: bulk (bulk copies, sm_90 and up), ldst (16-byte loads and "
        "stores, any GPU), auto (bulk where the GPU has it).",
        ("auto", "bulk", "ldst"),
    ),
    Variable(
        "DEEPEP_CUPY_CACHE_DIR",
        "",
        "Folder of compiled kernels; unset: deepep_cupy under $XDG_CACHE_HOME or ~/.cache.",
    ),
    Variable(
        "DEEPEP_CUPY_ASSERT_CACHED",
        "0",
        "1: a kernel that is not in the cache is a CompileError instead of being compiled.",
        ("0", "1"),
    ),
    Variable(
        "DEEPEP_CUPY_RANKS_PER_NODE",
        "",
        "Take each so many ranks in a row, of one machine, for a node, where the constructor is "
        "not given ranks_per_node; unset: nodes are machines.",
    ),
    Variable(
        "DEEPEP_CUPY_LOG",
        "info",
        "Lowest level of the lines on standard error (used only where the program has not set up "
        "logging itself).",
        ("debug", "info", "warning", "error"),
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read(name: str) -> str:
    """Value of a variable of the table, lower case where it has choices.

    Raises:
        ContractError: The value is none of the choices.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, "").strip() or variable.default
    if not variable.choices:
        return text
    if text.lower() not in variable.choices:
        raise ContractError(
            f"environment variable {name} must be one of {', '.join(variable.choices)}, got "
            f"{text!r}."
        )
    return text.lower()


def check() -> None:
    """Read all variables.

    Raises:
        ContractError: The value of one is none of its choices.
    """
    for variable in VARIABLES:
        read(variable.name)


def loads() -> str:
    """``DEEPEP_CUPY_LOADS``."""
    return read("DEEPEP_CUPY_LOADS")


def path() -> str:
    """``DEEPEP_CUPY_PATH``."""
    return read("DEEPEP_CUPY_PATH")


def assert_cached() -> bool:
    """``DEEPEP_CUPY_ASSERT_CACHED``."""
    return read("DEEPEP_CUPY_ASSERT_CACHED") == "1"


def ranks_per_node() -> int | str | None:
    """``DEEPEP_CUPY_RANKS_PER_NODE``; a text that is no number as it is, to be refused by all."""
    text = read("DEEPEP_CUPY_RANKS_PER_NODE")
    return int(text) if text.isdecimal() else text or None


def log_level() -> str:
    """``DEEPEP_CUPY_LOG``."""
    return read("DEEPEP_CUPY_LOG")


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist yet.

    Raises:
        ContractError: ``DEEPEP_CUPY_CACHE_DIR`` begins with ``~`` and a user that is not there.
    """
    chosen = read("DEEPEP_CUPY_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ContractError(
                f"environment variable DEEPEP_CUPY_CACHE_DIR must be a folder, got {chosen!r}, a "
                f"user whose home is not known."
            ) from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else _home() / ".cache"
    return root / "deepep_cupy"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME and no passwd entry, as in some containers
        return Path("/tmp") / f"deepep_cupy-{os.getuid()}"


_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def launcher_size() -> int:
    """How many processes ``mpirun`` has started, 1 where there is no ``mpirun``."""
    return max([1, *(_integer(name) for name in _SIZE_VARIABLES)])


def launcher_rank() -> int:
    """Rank that ``mpirun`` gave this process, 0 where there is no ``mpirun``; needs no MPI."""
    return max([0, *(_integer(name) for name in _RANK_VARIABLES)])


def launcher_local_rank() -> int | None:
    """Number that ``mpirun`` gave this process on its node, None where it gave none."""
    found = max(_integer(name) for name in _LOCAL_RANK_VARIABLES)
    return None if found < 0 else found


def _integer(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


@contextmanager
def setting(**variables: str) -> Iterator[None]:
    """Set variables of the table for the length of a ``with`` block.

    Args:
        variables: Name → text.
    """
    before = {name: os.environ.get(_BY_NAME[name].name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def child_environment(changes: Mapping[str, str | None], import_root: Path) -> dict[str, str]:
    """Environment for a process of ours: this one's with changes (None: unset).

    Args:
        changes: Name → value.
        import_root: Folder the child must be able to import from.
    """
    child = dict(os.environ)
    search = [str(import_root), *child.get("PYTHONPATH", "").split(os.pathsep)]
    child["PYTHONPATH"] = os.pathsep.join(part for part in search if part)
    for name, value in changes.items():
        if value is None:
            child.pop(name, None)
        else:
            child[name] = value
    return child
