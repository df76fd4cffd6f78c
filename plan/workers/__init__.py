"""Decisions for several workers: their layout, jobs and machines, and the placement of weights."""
