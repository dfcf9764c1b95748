"""Where the kernel text lies: in a checkout, an editable install and a wheel.

``cuda`` lies inside the package everywhere. ``ptx/`` is a top-level folder of the
repository, shipped in the wheel as ``deepep_cupy/_ptx``; an editable install does not map it, so
that a checkout and an editable install read the top-level folder itself.

======================  =====================================  ==============================
how it is installed     ``kernel_dir()``                       ``ptx_dir()``
======================  =====================================  ==============================
wheel                   ``deepep_cupy/cuda``                   ``deepep_cupy/_ptx``
checkout, editable      ``deepep_cupy/cuda``                   ``ptx``
======================  =====================================  ==============================
"""

from __future__ import annotations

from pathlib import Path

from deepep_cupy.errors import PlatformError

__all__ = ["kernel_dir", "ptx_dir"]

_PACKAGE = Path(__file__).resolve().parent


def kernel_dir() -> Path:
    """Return the folder of the CUDA text: ``asm/``, ``common/``, ``comm/`` and the ``.cu`` files.

    Raises:
        PlatformError: The installation is damaged; the message names the path.
    """
    folder = _PACKAGE / "cuda"
    if not folder.is_dir():
        message = (
            f"_resources.kernel_dir(): the CUDA text is missing, wanted the folder {folder}; "
            "install deepep_cupy again"
        )
        raise PlatformError(message)
    return folder


def ptx_dir() -> Path:
    """Return the folder of the hand-written PTX modules and their ``manifest.toml``.

    Raises:
        PlatformError: Neither place holds a manifest; the message names both.
    """
    shipped = _PACKAGE / "_ptx"
    if (shipped / "manifest.toml").is_file():
        return shipped
    root = _PACKAGE.parent
    checkout = root / "ptx"
    # A folder that happens to be called ptx beside site-packages/deepep_cupy is not ours.
    if (checkout / "manifest.toml").is_file() and (root / "pyproject.toml").is_file():
        return checkout
    message = (
        f"_resources.ptx_dir(): the PTX modules are missing, wanted manifest.toml in {shipped} "
        f"(a wheel) or in {checkout} beside a pyproject.toml (a checkout); "
        "install deepep_cupy again"
    )
    raise PlatformError(message)
