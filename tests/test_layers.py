"""The rooms may import only the rooms above them; the rest of the house rules that a tool can hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("plan", "metrics", "bench", "offload", "wan", "sampling", "distributed", "host", "nodes", "cli", "workbench")
LEVEL = {room: level for level, room in enumerate(ROOMS)}
COMFY = {
    "comfy",
    "comfy_api",
    "comfyui_version",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "server",
    "latent_preview",
    "nodes",
}
STDLIB_ONLY = {"plan"}
NO_WAN = {"plan", "metrics", "bench", "offload"}
MAX_FUNCTION_LINES = 60

FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def _imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name from the package root or absolute name, is ours)."""
    package = ("wanstream", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or "", False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield node.lineno, ".".join((*base[1:], name)), True


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upwards(path: Path) -> None:
    room = _room(path)
    for line, name, ours in _imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        top = name.split(".")[0]
        if ours:
            assert top in LEVEL, where
            assert top == room or LEVEL[top] < LEVEL[room], where
            continue
        assert top != "wanstream", f"{where}: inside the pack imports are relative"
        assert room == "host" or top not in COMFY, where
        if room in STDLIB_ONLY:
            assert top in _stdlib(), where
        if room in NO_WAN:
            assert top not in {"diffusers", "transformers"}, where


def test_host_and_nodes_do_not_know_each_other_backwards() -> None:
    for path in (ROOT / "host").rglob("*.py"):
        assert not [name for _, name, ours in _imports(path) if ours and name.startswith(("nodes", "cli"))], path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_on_a_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_owns(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), path
    assert path.stem not in {"utils", "common", "helpers", "manager"}, path


@pytest.mark.parametrize("room", ["metrics", "bench", "offload", "wan", "sampling", "host", "nodes", "cli"])
def test_only_one_file_may_synchronise_a_device(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "synchronize":
                # A fetch or read thread may wait for its own copies.
                assert path.relative_to(ROOT).as_posix() in {
                    "metrics/device.py",
                    "offload/cuda_streams.py",
                    "offload/device_slots.py",
                    "offload/gathered_cuda.py",
                }, f"{path}:{node.lineno}"


def _stdlib() -> frozenset[str]:
    import sys

    return frozenset(sys.stdlib_module_names)
