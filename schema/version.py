"""Which WanStream this is, for reports; `wanstream.__version__` says the same."""

from __future__ import annotations

VERSION = "0.1.0"
