"""Sharded weights: each rank keeps a part of every block; a gather restores the block."""
