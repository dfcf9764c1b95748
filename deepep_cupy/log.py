"""The package's logger: few lines, on standard error, from rank 0 unless a line concerns one rank.

A program that set up logging itself keeps what it set up: the handler below is added only where
no handler would see the lines.
"""

from __future__ import annotations

import contextlib
import logging

from deepep_cupy import env
from deepep_cupy.errors import ContractError

__all__ = ["logger", "set_up"]

logger = logging.getLogger("deepep_cupy")


def set_up() -> None:
    """Send the package's lines to standard error, unless the program has its own handlers."""
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("deepep_cupy: %(message)s"))
    logger.addHandler(handler)
    with contextlib.suppress(ContractError):  # whoever uses the variable says that it is wrong
        logger.setLevel(env.log_level().upper())
    logger.propagate = False
