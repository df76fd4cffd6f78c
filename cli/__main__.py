"""`python -m wanstream.cli` is the command `wanstream`."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
