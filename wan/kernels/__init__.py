"""Kernels of a block: row-wise functions, attention, and products with codes of one byte.

Each implementation returns the reason why it is not available. Implementations are chosen by a test on the device.
"""
