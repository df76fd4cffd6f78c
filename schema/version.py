"""WanStream version for reports. Equal to `wanstream.__version__`."""

from __future__ import annotations

VERSION = "0.1.0"
