"""Package order, public surfaces, and other house rules for tools to check."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanstream.tools.code_counts import (
    SourceTree,
    components,
    import_depths,
    past_surface,
    surfaces,
)

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "schema",
    "plan",
    "shapes",
    "devices",
    "telemetry",
    "bench",
    "offload",
    "block_kernels",
    "wan",
    "sampling",
    "distributed",
    "host",
    "nodes",
    "batch",
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
LONGEST_CHAIN = 25
STDLIB_ONLY = {"schema", "plan", "shapes"}
NO_WAN = {"schema", "plan", "shapes", "devices", "telemetry", "bench", "offload"}
ORDER_INSIDE = {
    "offload": (
        "core",
        "formats",
        "sources",
        "sharding",
        "transfers",
        "host_memory",
        "engine",
        "probes",
    ),
    "wan": (
        "latents",
        "checkpoint",
        "",
        "text",
        "vae",
        "lora",
        "transformer",
        "experts",
        "measurement",
    ),
    "sampling": ("steps", "cache", "inputs", "loop", ""),
    "distributed": ("", "plan", "worker", "transport", "ray", "driver"),
    "batch": ("folder", "rows", "journal", "", "running", "servers"),
    "nodes": ("runs", "", "native", "clips", "variants"),
    "schema": ("text", "records", "", "refs"),
    "plan": ("programs", ""),
    "devices": ("machine", ""),
    "host": (
        "workers",
        "",
        "embedded.workflow",
        "embedded",
        "comfy",
        "comfy.native.network",
        "comfy.native.streamed",
        "comfy.native.runs",
        "comfy.native",
        "comfy.experts",
        "comfy.adapter",
    ),
}
"""Sub-packages by package: each one imports only earlier ones. "" has the package's modules."""
MOST_NAMES = 30
"""Names for other packages to import from a package, or from a sub-package with a list."""

EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES)


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    """Half a million objects, dropped after these tests to keep other garbage collections fast."""
    return SourceTree(ROOT, PACKAGES)


def _modules(tree: SourceTree, package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path, module in tree.trees.items():
        if path.relative_to(ROOT).parts[0] == package:
            yield path, module


def _foreign_imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each module imported absolutely, with the line."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def test_imports_point_upwards(tree: SourceTree) -> None:
    for found in tree.imports:
        source, target = found.source.split(".")[0], found.target.split(".")[0]
        where = f"{found.source}:{found.line} imports {found.target}"
        assert target in LEVEL, where
        assert target == source or LEVEL[target] < LEVEL[source], where


@EACH_PACKAGE
def test_packages_import_only_the_libraries_of_their_layer(tree: SourceTree, package: str) -> None:
    for path, module in _modules(tree, package):
        for line, name in _foreign_imports(module):
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            top = name.split(".")[0]
            assert top != "wanstream", f"{where}: inside the pack imports are relative"
            assert package == "host" or top not in COMFY, where
            assert package not in STDLIB_ONLY or top in sys.stdlib_module_names, where
            assert package not in NO_WAN or top not in {"diffusers", "transformers"}, where


def test_modules_do_not_import_each_other_in_cycles(tree: SourceTree) -> None:
    """Imports inside functions and for type checkers count too."""
    assert not [cycle for cycle in components(tree.edges()) if len(cycle) > 1]


def test_sub_packages_do_not_import_each_other_in_cycles(tree: SourceTree) -> None:
    cycles = [cycle for cycle in components(tree.sub_package_edges()) if len(cycle) > 1]
    assert not cycles


@pytest.mark.parametrize("package", ORDER_INSIDE)
def test_sub_packages_import_the_earlier_ones(tree: SourceTree, package: str) -> None:
    level = {f"{package}.{part}".strip("."): at for at, part in enumerate(ORDER_INSIDE[package])}
    for source, targets in tree.sub_package_edges().items():
        for target in targets if source.split(".")[0] == package else ():
            assert level[target] < level[source], f"{source} imports {target}"


def test_other_packages_are_imported_by_their_public_surface(tree: SourceTree) -> None:
    # tools/walks.py measures calls behind the surface of offload.
    past = [each for each in past_surface(tree) if each.source != "tools.walks"]
    assert not past, "\n".join(
        f"{each.source}:{each.line} imports {each.name} of {each.target}" for each in past
    )


def test_surfaces_are_narrow(tree: SourceTree) -> None:
    for surface, count in surfaces(tree).items():
        assert count <= MOST_NAMES, f"other packages import {count} names from {surface}"


def test_chains_of_imports_stay_short(tree: SourceTree) -> None:
    """A reader may have to open every module along a chain."""
    depths = import_depths(tree.edges())
    deepest = max(depths, key=lambda module: depths[module])
    assert depths[deepest] <= LONGEST_CHAIN, f"{deepest} is behind {depths[deepest]} modules"


def test_only_node_classes_look_the_host_up(tree: SourceTree) -> None:
    """Functions get the host, or the part they need, as an argument."""
    for path, module in tree.trees.items():
        classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        in_classes = {
            id(node)
            for each in classes
            for node in ast.walk(each)
            if path.is_relative_to(ROOT / "nodes")
        }
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "current_host"
            ):
                assert id(node) in in_classes, f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize(
    "package", [package for package in PACKAGES if package not in {"cli", "tools"}]
)
def test_public_surfaces_list_their_names(tree: SourceTree, package: str) -> None:
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree.trees[ROOT / package / "__init__.py"])
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    listed = tree.exported(package)
    assert listed
    if package not in {"host", "nodes"}:
        assert listed == imported


@EACH_PACKAGE
def test_module_docstrings_start_with_a_noun_or_a_verb(tree: SourceTree, package: str) -> None:
    for path, module in _modules(tree, package):
        docstring = ast.get_docstring(module)
        assert docstring, path
        assert docstring.split(maxsplit=1)[0] not in {
            "What",
            "Which",
            "Where",
            "Whether",
            "How",
            "Who",
        }, path
        assert path.stem not in {"utils", "common", "helpers", "manager"}, path


def _docstrings(module: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield node, ast.get_docstring(node) or ""


def test_docstrings_name_errors_that_exist(tree: SourceTree) -> None:
    known = set(vars(builtins)) | {"OutOfMemoryError"}  # the last comes from torch
    for module in tree.trees.values():
        known |= {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    for path, module in tree.trees.items():
        for _, text in _docstrings(module):
            assert set(re.findall(r"\b[A-Z]\w+Error\b", text)) <= known, path


@EACH_PACKAGE
def test_docstrings_describe_arguments_that_exist(tree: SourceTree, package: str) -> None:
    documented = [
        (path, *each) for path, module in _modules(tree, package) for each in _docstrings(module)
    ]
    for path, node, text in documented:
        if isinstance(node, ast.ClassDef):
            inits = [
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            ]
            node = inits[0] if inits else node
        if not isinstance(node, ast.FunctionDef):
            continue
        _, _, section = text.partition("Args:\n")
        described = re.findall(r"^    (\w+): ", section.split("\n\n")[0], re.MULTILINE)
        arguments = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        assert set(described) <= arguments, f"{path}:{node.lineno}"


@EACH_PACKAGE
def test_only_one_file_may_synchronise_a_device(tree: SourceTree, package: str) -> None:
    for path, module in _modules(tree, package):
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr == "synchronize":
                # A fetch or read thread may wait for its own copies.
                assert path.relative_to(ROOT).as_posix() in {
                    "devices/clock.py",
                    "offload/transfers/cuda.py",
                    "offload/host_memory/device_slots.py",
                }, f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"devices"}))
def test_only_devices_calls_the_modules_of_a_device(tree: SourceTree, package: str) -> None:
    for path, module in _modules(tree, package):
        for node in ast.walk(module):
            called = isinstance(node, ast.Attribute) and node.attr in {
                "cuda",
                "xpu",
                "mps",
                "accelerator",
            }
            if called and isinstance(node.value, ast.Name) and node.value.id == "torch":
                pytest.fail(
                    f"{path.relative_to(ROOT)}:{node.lineno} calls torch.{node.attr}: use "
                    "devices.DeviceRuntime"
                )


def test_the_plan_command_starts_without_torch(tree: SourceTree) -> None:
    """Importing torch takes seconds, and importing a module runs every `__init__` above it."""
    at_start: dict[str, set[str]] = {}
    for found in tree.imports:
        if not found.in_function and not found.for_types:
            parts = found.target.split(".")
            at_start.setdefault(found.source, set()).update(
                ".".join(parts[:end]) for end in range(1, len(parts) + 1)
            )
    reached = {"cli.plan"}
    while more := {target for module in reached for target in at_start.get(module, ())} - reached:
        reached |= more
    heavy = [
        module
        for module in reached & tree.modules.keys()
        if re.search("^import torch", _source(tree, module), re.M)
    ]
    assert not heavy


def _source(tree: SourceTree, module: str) -> str:
    return tree.modules[module].read_text(encoding="utf-8")
