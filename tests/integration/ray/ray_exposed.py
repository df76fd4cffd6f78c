"""A process in a separate network, with a Ray that other machines could reach there.

Usage: `ray_exposed.py FOLDER`. Prints as JSON the refusals raised by pools for this Ray. It is
started in a network namespace, and so is not visible outside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from wanstream.distributed.ray.environment import RaySetupError
from wanstream.distributed.ray.pool import RayPool
from wanstream.schema.refs import WorkersRef

ADDRESS, PORT = "198.18.9.1", 6379
LIMIT_S = 120


def lay_network() -> None:
    """Set up the only device with a non-loopback address."""
    for words in ("link set lo up", f"addr add {ADDRESS}/32 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)


def start_ray(folder: Path) -> None:
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    place = ["--node-ip-address", ADDRESS, "--port", str(PORT), "--temp-dir", str(folder)]
    small = ["--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", str(100 << 20)]
    plain = ["--include-dashboard=false", "--disable-usage-stats"]
    subprocess.run(
        [*program, *place, *small, *plain], check=True, stdout=sys.stderr, timeout=LIMIT_S
    )


def refusal(**changes: object) -> str:
    try:
        RayPool(WorkersRef(count=1, threads=1, **changes)).close()
    except RaySetupError as err:
        return str(err)
    return ""


def main(folder: Path) -> dict[str, str]:
    lay_network()
    start_ray(folder)
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("ab" * 32)
    return {
        "without a token": refusal(
            address=f"{ADDRESS}:{PORT}", beyond_loopback=True, token_file=str(token_file)
        ),
        "by way of loopback": refusal(address=f"127.0.0.1:{PORT}"),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
