"""Wan transformer forward pass, block by block."""
