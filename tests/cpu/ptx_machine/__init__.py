"""Runs PTX text where there is no GPU: several ranks, one block each, a seeded scheduler.

``program.Program`` translates an entry to Python. Every access to global memory, every fence,
barrier and look at the clock ends a stretch of it, and there ``world.World`` may turn to another
thread of another rank. ``ranks.Node`` queues barriers, of either kind, on ranks.

Of memory order, the side of the writer is modelled. Stores to other ranks and to the host arrive
late and in any order (those to one address in theirs). A release by a thread makes it wait for its
own stores, for those of its block before the last block barrier, and for those of earlier kernels.
A load sees the newest value that has arrived, so that a missing acquire is not found here.
"""
