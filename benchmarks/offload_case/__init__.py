"""Comparison of offloading strategies, WanStream and peers: same two experts, inputs and loop."""
