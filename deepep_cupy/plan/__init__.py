"""Integers only: sizes, offsets, grids, headers, generated constants. No CuPy, no MPI."""
