"""Forward pass of a Wan transformer and the replacements of its block forwards."""
