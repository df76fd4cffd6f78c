"""Host selection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PICK = """
import sys
sys.path.insert(0, sys.argv[1])
from wanstream.host import io
print(io.__name__)
"""


@pytest.mark.parametrize("comfyui", [False, True])
def test_comfyui_is_picked_if_it_can_be_found(tmp_path: Path, comfyui: bool) -> None:
    if comfyui:
        _write_stand_in(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PICK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "comfy_api.latest.io" if comfyui else "wanstream.host.embedded.workflow.io"
    )


def _write_stand_in(folder: Path) -> None:
    """The modules that `host` imports, with only the content it reads on import."""
    latest = folder / "comfy_api" / "latest"
    latest.mkdir(parents=True)
    (folder / "comfy").mkdir()
    for empty in (
        latest.parent / "__init__.py",
        latest / "io.py",
        latest / "ui.py",
        folder / "folder_paths.py",
    ):
        empty.touch()
    for empty in ("__init__", "cli_args", "utils", "model_management"):
        (folder / "comfy" / f"{empty}.py").touch()
    (folder / "comfyui_version.py").write_text('__version__ = "0.3.64"\n')
    (folder / "comfy_execution").mkdir()
    (folder / "comfy_execution" / "__init__.py").touch()
    (folder / "comfy_execution" / "utils.py").write_text("def get_executing_context(): pass\n")
    (latest / "io.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Schema: pass\n"
    )
    (latest / "__init__.py").write_text("from . import io, ui\nclass ComfyExtension: pass\n")
