"""Decisions for several workers: layout, jobs, machines, and the placement of weights."""
