"""Runs PTX grids where there is no GPU: many blocks on the SMs of several GPUs that share memory.

``text.Program`` reads an entry; ``world.World`` runs launches of it, turning to another thread or
to the copy engine wherever others could notice, in an order drawn from a seed. Each SM has an L1
that keeps lines as they were when they were first read, and is emptied by what empties it on a
GPU: an acquire on that SM, and a new kernel. So loads are stale here where they may be on a GPU.
Memory itself is in order: this is no test of releases.
"""
