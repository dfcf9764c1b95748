"""The host half of the simulator: the product's own Buffers over simulated GPUs, under a seed.

``baton``: threads of which one runs at a time, and virtual time. ``memory``: bytes, and who may
touch them. ``gpus``: streams, events, graphs. ``operations``: the kernels, step by step.
``machine``: what stands where CuPy, the driver and MPI are. ``stories``: what the ranks do, and
what must come of it. ``faults``: mistakes put into the product, which must be found.
"""
