"""UMT5 text encoder, streamed: tokenizers, weights, a cache of embeddings."""
