"""Batch rows, and the jobs they become."""
