"""Measurements in ComfyUI's Python, in a process with ComfyUI and this pack imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

INSIDE = "--in-comfyui"
"""Argument for a script that runs in ComfyUI's Python."""
CASES = Path(__file__).parents[2] / "tests" / "integration" / "comfy"
"""Folder with the ComfyUI tests. Their models and files are measured."""


def run_in_comfyui(script: str, *arguments: str) -> Any:
    """Run a script with `INSIDE` and arguments, and return the JSON in the last line.

    `COMFYUI_PATH` and `COMFYUI_PYTHON` name the ComfyUI.
    """
    from wanstream.tools.comfyui import find_comfyui

    comfyui = find_comfyui()
    done = subprocess.run(
        [str(comfyui.python), str(Path(script).resolve()), INSIDE, *arguments],
        cwd=comfyui.path,
        env=comfyui.environment(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    # ComfyUI prints other lines before the JSON.
    return json.loads(done.stdout.splitlines()[-1])


def enter_comfyui(*options: str) -> dict[str, str]:
    """Import ComfyUI for the CPU and this pack in the process, and return the versions.

    Args:
        options: further ComfyUI command line options.
    """
    # ComfyUI parses `sys.argv` when `comfy.cli_args` is first imported.
    sys.argv = ["main.py", "--cpu", *options]
    # The working directory is the ComfyUI folder.
    sys.path[:0] = [".", str(CASES)]
    import comfy.options

    # Other ComfyUI modules read the options while they are imported, so this comes first.
    comfy.options.enable_args_parsing()
    import comfyui_version
    import torch
    import utils.extra_config  # noqa: F401 (before other modules called utils)
    from inside.pack import load_pack

    import nodes  # noqa: F401 (in the order in which ComfyUI imports)

    load_pack()
    return {"torch": str(torch.__version__), "comfyui": comfyui_version.__version__}
