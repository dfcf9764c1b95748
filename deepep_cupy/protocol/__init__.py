"""What ranks, host and device agree on: headers, control block, sizes. No CuPy, no MPI."""
