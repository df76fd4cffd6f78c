"""Forward pass of a Wan transformer, its compute kernels and patched block forwards."""
