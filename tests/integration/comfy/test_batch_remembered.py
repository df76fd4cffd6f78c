"""Rows whose pictures the server remembers from an earlier job.

It computes nothing, and still names the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wanstream.cli import main
from wanstream.cli.arguments import DONE
from wanstream.tools.comfyui import Server

pytestmark = pytest.mark.comfy

PICTURE = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
    },
    "2": {
        "class_type": "SaveImage",
        "inputs": {"images": ["1", 0], "filename_prefix": "remembered/picture"},
    },
}


def test_equal_rows_and_a_second_batch_of_them_all_get_their_files(
    server: Server, tmp_path: Path
) -> None:
    jobs, workflow = tmp_path / "jobs.jsonl", tmp_path / "workflow.json"
    jobs.write_text("\n".join(json.dumps({"name": name, "1.color": 7}) for name in ("one", "two")))
    workflow.write_text(json.dumps(PICTURE))
    for folder in (tmp_path / "first", tmp_path / "second"):
        call = [
            "batch",
            str(jobs),
            "--workflow",
            str(workflow),
            "--out",
            str(folder),
            "--server",
            server.url,
        ]
        assert main(call) == DONE
        assert sorted(file.name for file in folder.glob("*.png")) == ["one.png", "two.png"]
