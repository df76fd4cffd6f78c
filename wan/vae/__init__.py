"""VAEs of Wan2.1 and Wan2.2: weights, encoding, decoding in tiles, memory estimates."""
