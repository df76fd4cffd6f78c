"""Nodes for videos with several clips: continue by latent, save and load latents, join clips."""
