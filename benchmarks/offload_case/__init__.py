"""Comparison of offloading strategies: the same two experts, inputs and loop, with WanStream and with its peers."""
