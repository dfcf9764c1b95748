"""Stand-ins for a GPU, so that the Python side of the CUDA engine runs without one.

``device``: CuPy's arrays, memory, streams and events over host memory; who waited for whom is
followed, and an access that is not ordered behind an earlier one is a fault. ``kernels``: what the
kernels do, in NumPy, for ranks that are threads. ``engine``: the engine's parts, put together.
"""
