"""Forward pass of a Wan transformer, block by block."""
