"""Command lines of `wanstream batch` in a folder, servers for it, and what it has left there."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Prompt = dict[str, dict[str, Any]]

WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"


def shipped(name: str = "t2v", /, **changes: Mapping[str, Any]) -> Prompt:
    """Return a shipped workflow with changed inputs by node."""
    workflow: Prompt = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    for node_id, inputs in changes.items():
        workflow[node_id]["inputs"] |= inputs
    return workflow


def write_rows(folder: Path, *rows: object) -> Path:
    """Write rows as JSON lines, texts as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "jobs.jsonl"


def command_line(folder: Path, workflow: object, *rows: object, options: Any = ()) -> list[str]:
    """Write the files for a batch with the output folder `out`, and return its command line."""
    jobs = write_rows(folder, *rows)
    prompt = folder / "workflow.json"
    prompt.write_text(json.dumps(workflow), encoding="utf-8")
    places = ["--workflow", str(prompt), "--out", str(folder / "out")]
    return ["batch", str(jobs), *places, *map(str, options)]


def journal_rows(folder: Path, columns: str = "stem, state") -> list[tuple[Any, ...]]:
    """Return these columns of the journal in an output folder, by line."""
    with closing(sqlite3.connect(folder / "journal.sqlite")) as connection:
        return connection.execute(f"SELECT {columns} FROM rows ORDER BY line").fetchall()


def videos(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the finished videos by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.mp4"))}


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server on a thread, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
