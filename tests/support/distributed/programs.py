"""Programs with their own Ray."""

import os
import subprocess
from contextlib import contextmanager

LIMIT_S = 240.0


def environment(**changes):
    """Return this process's environment without the variables of Ray, for one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


@contextmanager
def started(command, **given):
    """Yield a program with pipes, and kill it in the end."""
    words = [*map(str, command)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, **pipes, **given)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
