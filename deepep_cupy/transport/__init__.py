"""The group of ranks, and the memory that all of them can see."""
