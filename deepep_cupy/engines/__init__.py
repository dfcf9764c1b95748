"""Two engines behind one protocol: ``gpu`` (kernels, NVLink) and ``host`` (NumPy, MPI)."""
