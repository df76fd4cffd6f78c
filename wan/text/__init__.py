"""Streamed UMT5 text encoder: tokenizers, weights and an embedding cache."""

from __future__ import annotations

from .embedding_cache import EmbeddingCache
from .encoder import encoder_version, open_text_encoder
from .sentence_model import Piece, sentence_model

__all__ = ["EmbeddingCache", "Piece", "encoder_version", "open_text_encoder", "sentence_model"]
