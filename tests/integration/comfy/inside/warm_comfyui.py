"""Runs in ComfyUI's own Python: programs in forks of one process with ComfyUI and this pack.

The argument is a base directory. Each line on stdin is a request, and the line printed for it is
the exit code.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback

BASE = sys.argv[1]
# ComfyUI's own modules, imported in `main.py` order.
sys.argv = ["main.py", "--cpu", "--base-directory", BASE]
sys.path[:0] = ["."]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import utils.extra_config  # noqa: E402, F401, I001
import folder_paths  # noqa: E402, F401
import nodes  # noqa: E402, F401
from comfy_api.latest import io, ui  # noqa: E402, F401
from pack import load_pack  # noqa: E402

load_pack()
import wanstream.nodes  # noqa: E402, F401 - takes seconds


def _run(code: str, arguments, seconds: int, files: dict[str, str]) -> int:
    """Run code, with results in files, as in a separate process. Return the exit code."""
    signal.alarm(seconds)  # ends the process
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        with open(files[name], "wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    names = globals()
    names["arguments"] = arguments
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), names)  # noqa: S102
    except Exception:  # noqa: BLE001 - the test that asked shows it
        traceback.print_exc()
        return 1
    sys.stdout.write(f"{json.dumps(names['answer'])}\n")
    return 0


def main() -> int:
    gc.freeze()  # else a fork copies all imported memory when it collects garbage
    requests = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - no buffer, which forks copy
    while request := requests.readline():
        process = os.fork()
        if not process:
            return _run(**json.loads(request))
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.write(1, f"{status}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
