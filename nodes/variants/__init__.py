"""Nodes with inputs for models built from Wan's blocks: Fun Control and Bernini."""
