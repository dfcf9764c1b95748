"""One protocol (``base``), two engines: ``cuda`` (kernels, NVLink) and ``host`` (NumPy, MPI)."""
