"""Latent spaces and latent files."""

from .file import read_latent, tensor_digest, write_latent
from .space import SPACES, WAN21, WAN22, LatentSpace, denormalise, normalise, space_of

__all__ = [
    "SPACES",
    "WAN21",
    "WAN22",
    "LatentSpace",
    "denormalise",
    "normalise",
    "read_latent",
    "space_of",
    "tensor_digest",
    "write_latent",
]
