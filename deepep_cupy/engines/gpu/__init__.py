"""Parts of the CUDA engine: arrays in, kernels ready to launch, what kernels report."""
