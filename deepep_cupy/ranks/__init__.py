"""The group of ranks: MPI, meetings with a deadline, the abort board, the end of a process."""
