"""Memory that all GPUs of a node can reach: the region, the pool of blocks in it, CUDA IPC."""
