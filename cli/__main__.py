"""Entry point of `python -m wanstream.cli`, the same as the command `wanstream`."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
