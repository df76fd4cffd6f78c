"""Placement of weights among the workers of a group."""
