"""Step caches: first-block cache and MagCache, and the calibration of the latter."""
