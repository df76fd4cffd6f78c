"""A process in which Ray fails to start for several reasons in turn.

Prints the errors and the leftovers as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path

import psutil

from wanstream.distributed.ray.environment import RaySetupError
from wanstream.distributed.ray.pool import RayPool
from wanstream.schema.refs import WorkersRef

STORE_BYTES = 128 << 20
LIMIT_S = 60


def refusal(store_bytes: int) -> str:
    try:
        RayPool(WorkersRef(count=1, threads=1), "cpu", store_bytes=store_bytes).close()
    except RaySetupError as err:
        return str(err)
    return ""


def left() -> list[str]:
    """Processes still running after a moment."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=LIMIT_S)
    return [process.name() for process in alive]


def main(folder: Path) -> dict[str, object]:
    long = folder / ("a" * 120)
    long.mkdir()
    found: dict[str, object] = {"no room": refusal(1 << 10), "left": left()}
    tempfile.tempdir = str(long)
    found["long name"] = refusal(STORE_BYTES)
    tempfile.tempdir = str(folder / "gone")
    found["no folder"] = refusal(STORE_BYTES)
    found["folders"] = [path.name for path in long.iterdir()]
    found["left at the end"] = left()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
