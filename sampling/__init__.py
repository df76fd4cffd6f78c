"""L4: denoises."""
