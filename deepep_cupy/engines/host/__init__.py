"""The host engine: NumPy arrays between processes, over MPI."""
