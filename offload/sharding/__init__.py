"""Sharded weights: each rank keeps a part of every block, and a gather restores the block."""
