"""Layer order, public surfaces, folder sizes, and the other house rules that a tool can check."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "schema",
    "plan",
    "devices",
    "telemetry",
    "bench",
    "offload",
    "wan",
    "sampling",
    "distributed",
    "host",
    "nodes",
    "testing",
    "cli",
    "tools",
)
LEVEL = {package: level for level, package in enumerate(PACKAGES)}
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
STDLIB_ONLY = {"schema", "plan"}
NO_WAN = {"schema", "plan", "devices", "telemetry", "bench", "offload"}
MAX_FUNCTION_LINES = 60
MAX_MODULES = 15

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
Found = TypeVar("Found")
EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES)


def _files(package: str) -> list[Path]:
    return [path for path in FILES if _package(path) == package]


def _in_files(package: str, find: Callable[[Path], Iterable[Found]]) -> Iterator[tuple[Path, Found]]:
    for path in _files(package):
        for found in find(path):
            yield path, found


@pytest.fixture(scope="module", autouse=True)
def _drop_trees() -> Iterator[None]:
    """Half a million objects would slow down every garbage collection of later tests."""
    yield
    _tree.cache_clear()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def _imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name from the package root or absolute name, is ours)."""
    parents = ("wanstream", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or "", False
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield node.lineno, ".".join((*base[1:], name)), True


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_at_top_level(path: Path) -> Iterator[str]:
    """Names from the package root that a module imports outside functions, those under TYPE_CHECKING included.

    The imported name counts too, because `from .package import name` may import the submodule `name`.
    """
    parents = ("wanstream", *path.relative_to(ROOT).parts[:-1])
    body = _tree(path).body
    for node in [*body, *(each for check in body if isinstance(check, ast.If) for each in check.body)]:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*parents[: len(parents) - node.level + 1][1:], *([node.module] if node.module else []))
            if node.module:
                yield ".".join(base)
            yield from (".".join((*base, alias.name)) for alias in node.names)


@EACH_PACKAGE
def test_imports_point_upwards(package: str) -> None:
    for path, (line, name, ours) in _in_files(package, _imports):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        top = name.split(".")[0]
        if ours:
            assert top in LEVEL, where
            assert top == package or LEVEL[top] < LEVEL[package], where
            continue
        assert top != "wanstream", f"{where}: inside the pack imports are relative"
        assert package == "host" or top not in COMFY, where
        if package in STDLIB_ONLY:
            assert top in _stdlib(), where
        if package in NO_WAN:
            assert top not in {"diffusers", "transformers"}, where


def test_modules_do_not_name_each_other_in_cycles() -> None:
    """Imports inside functions are exempt: `host/api.py` imports the adapter of this process on first use."""
    edges = {_module(path): {*_imported_at_top_level(path)} - {_module(path)} for path in FILES}
    while leaves := {module for module, targets in edges.items() if not targets & edges.keys()}:
        edges = {module: targets for module, targets in edges.items() if module not in leaves}
    assert not edges, f"these modules are in a cycle, or import one: {sorted(edges)}"


@EACH_PACKAGE
def test_other_packages_are_imported_by_their_public_surface(package: str) -> None:
    for path, (line, name, ours) in _in_files(package, _imports):
        if ours and name and name.split(".")[0] != package:
            target = ROOT.joinpath(*name.split("."))
            assert (target / "__init__.py").is_file(), f"{path.relative_to(ROOT)}:{line} imports the module {name}"


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in {"cli", "tools"}])
def test_public_surfaces_list_their_names(package: str) -> None:
    tree = _tree(ROOT / package / "__init__.py")
    listed = [
        [constant.value for constant in node.value.elts if isinstance(constant, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        if [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    assert len(listed) == 1
    if package not in {"host", "nodes"}:
        assert set(listed[0]) == imported


def test_folders_hold_few_modules() -> None:
    for folder in {path.parent for path in FILES}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"


def test_host_and_nodes_do_not_know_each_other_backwards() -> None:
    for path in (ROOT / "host").rglob("*.py"):
        assert not [name for _, name, ours in _imports(path) if ours and name.startswith(("nodes", "cli"))], path


@EACH_PACKAGE
def test_functions_fit_on_a_screen(package: str) -> None:
    for path in _files(package):
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


@EACH_PACKAGE
def test_module_docstrings_start_with_a_noun_or_a_verb(package: str) -> None:
    for path in _files(package):
        docstring = ast.get_docstring(_tree(path))
        assert docstring, path
        assert docstring.split(maxsplit=1)[0] not in {"What", "Which", "Where", "Whether", "How", "Who"}, path
        assert path.stem not in {"utils", "common", "helpers", "manager"}, path


def _docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield node, ast.get_docstring(node) or ""


def test_docstrings_name_errors_that_exist() -> None:
    known = set(vars(builtins)) | {"OutOfMemoryError"}  # the last is of torch
    trees = [_tree(path) for path in FILES]
    known |= {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for path in FILES:
        for _, text in _docstrings(path):
            assert set(re.findall(r"\b[A-Z]\w+Error\b", text)) <= known, path


@EACH_PACKAGE
def test_docstrings_describe_arguments_that_exist(package: str) -> None:
    for path, (node, text) in _in_files(package, _docstrings):
        if isinstance(node, ast.ClassDef):
            inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            node = inits[0] if inits else node
        if not isinstance(node, ast.FunctionDef):
            continue
        _, _, section = text.partition("Args:\n")
        described = re.findall(r"^    (\w+): ", section.split("\n\n")[0], re.MULTILINE)
        arguments = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        assert set(described) <= arguments, f"{path}:{node.lineno}"


@EACH_PACKAGE
def test_only_one_file_may_synchronise_a_device(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "synchronize":
                # A fetch or read thread may wait for its own copies.
                assert path.relative_to(ROOT).as_posix() in {
                    "devices/clock.py",
                    "offload/transfers/cuda.py",
                    "offload/sharding/device_slots.py",
                    "offload/sharding/cuda.py",
                }, f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"devices"}))
def test_only_devices_calls_the_modules_of_a_device(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(_tree(path)):
            called = isinstance(node, ast.Attribute) and node.attr in {"cuda", "xpu", "mps", "accelerator"}
            if called and isinstance(node.value, ast.Name) and node.value.id == "torch":
                pytest.fail(
                    f"{path.relative_to(ROOT)}:{node.lineno} calls torch.{node.attr}: use devices.DeviceRuntime"
                )


def _stdlib() -> frozenset[str]:
    import sys

    return frozenset(sys.stdlib_module_names)
