"""Entry point of `python -m wanstream.cli`, the same as the command `wanstream`."""

import sys

from . import main

sys.exit(main())
