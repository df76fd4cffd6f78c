"""Nodes for the inputs of models made from Wan's blocks: Fun Control and Bernini."""
