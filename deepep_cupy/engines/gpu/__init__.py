"""The GPU engine: CuPy arrays, one kernel per operation and rank."""
