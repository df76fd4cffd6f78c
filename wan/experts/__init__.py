"""Pairs of experts and single models: opening, offload engine, embedders, registry."""
