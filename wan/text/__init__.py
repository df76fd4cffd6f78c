"""Streamed UMT5 text encoder: tokenizers, weights and a cache of embeddings."""
