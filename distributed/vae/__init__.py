"""VAE decoding shared by workers."""
