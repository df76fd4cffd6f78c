"""Step caches: first-block cache, EasyCache and MagCache with its calibration."""

from .base import Stage, StepLanes
from .mag_table import NEAR_SIGMA, MagTable
from .settings import PRESETS, CacheSettings, EasyCache, FirstBlockCache, MagCache

__all__ = [
    "NEAR_SIGMA",
    "PRESETS",
    "CacheSettings",
    "EasyCache",
    "FirstBlockCache",
    "MagCache",
    "MagTable",
    "Stage",
    "StepLanes",
]
