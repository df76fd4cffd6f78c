"""Cancel queued and running jobs by their ids. Other jobs continue.

python cancel.py ID ...
"""

from __future__ import annotations

import sys

from comfy_http import cancel


def main(*prompt_ids: str) -> None:
    for prompt_id in prompt_ids:
        cancel(prompt_id)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError) as err:
        sys.exit(f"cancel: {err}")
