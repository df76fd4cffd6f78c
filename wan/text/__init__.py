"""Streamed UMT5 text encoder: tokenizers, weights and an embedding cache."""

from .embedding_cache import EmbeddingCache
from .encoder import encoder_version, open_text_encoder
from .sentence_model import Piece, sentence_model

__all__ = ["EmbeddingCache", "Piece", "encoder_version", "open_text_encoder", "sentence_model"]
