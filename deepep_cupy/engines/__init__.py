"""One protocol (``base``), two engines: ``cuda`` (kernels over NVLink) and ``host`` (NumPy, MPI)."""
