"""Package order, public surfaces, and other house rules for tools to check."""

import ast
import builtins
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from wanstream.tools import code_counts
from wanstream.tools.code_counts import SourceTree, components, import_depths, surfaces

ROOT = Path(__file__).parent.parent
ORDER = """
    schema plan shapes devices telemetry bench offload block_kernels wan sampling distributed host
    nodes batch testing cli tools
"""
PACKAGES = ORDER.split()
LEVEL = {package: level for level, package in enumerate(PACKAGES)}
COMFY = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version"}
COMFY |= {"folder_paths", "latent_preview", "nodes", "server"}
LONGEST_CHAIN = 25
STDLIB_ONLY = {"schema", "plan", "shapes"}
NO_WAN = {"schema", "plan", "shapes", "devices", "telemetry", "bench", "offload"}
ORDER_INSIDE = {
    "offload": "core formats sources sharding transfers host_memory engine probes",
    "wan": "latents checkpoint . text vae lora transformer experts measurement",
    "sampling": "steps cache inputs loop .",
    "distributed": ". plan worker transport ray driver",
    "batch": "folder rows journal . running servers",
    "nodes": "runs . native clips variants",
    "schema": "text records . refs",
    "plan": "programs .",
    "devices": "machine .",
    "host": "workers . embedded.workflow embedded comfy comfy.native.network "
    "comfy.native.streamed comfy.native.runs comfy.native comfy.experts comfy.adapter",
}
"""Sub-packages by package: each one imports only earlier ones. "." has the package's modules."""
MOST_NAMES = 30
"""Names for other packages to import from a package, or from a sub-package with a list."""


@pytest.fixture(scope="module")
def tree():
    """Half a million objects, dropped after these tests to keep other garbage collections fast."""
    return SourceTree(ROOT, PACKAGES)


KINDS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Module, ast.ClassDef, ast.FunctionDef)


@pytest.fixture(scope="module")
def nodes(tree):
    """Syntax nodes of all modules by type, each with the file's path in the project."""
    found = defaultdict(list)
    for path, module in tree.trees.items():
        for node in ast.walk(module):
            if isinstance(node, KINDS):
                found[type(node)].append((path.relative_to(ROOT), node))
    return found


def _foreign_imports(nodes):
    """Yield each module imported absolutely, with the file and the line."""
    for place, node in nodes[ast.Import]:
        yield from ((place, node.lineno, alias.name) for alias in node.names)
    for place, node in nodes[ast.ImportFrom]:
        if node.level == 0:
            yield place, node.lineno, node.module or ""


def test_imports_point_upwards(tree):
    for found in tree.imports:
        source = found.source.split(".")[0]
        target = found.target.split(".")[0]
        where = f"{found.source}:{found.line} imports {found.target}"
        assert target in LEVEL, where
        assert target == source or LEVEL[target] < LEVEL[source], where


def test_packages_import_only_the_libraries_of_their_layer(nodes):
    for place, line, name in _foreign_imports(nodes):
        package = place.parts[0]
        where = f"{place}:{line} imports {name}"
        top = name.split(".")[0]
        assert top != "wanstream", f"{where}: inside the pack imports are relative"
        assert package == "host" or top not in COMFY, where
        assert package not in STDLIB_ONLY or top in sys.stdlib_module_names, where
        assert package not in NO_WAN or top not in {"diffusers", "transformers"}, where


def test_modules_do_not_import_each_other_in_cycles(tree):
    """Imports inside functions and for type checkers count too."""
    assert not [cycle for cycle in components(tree.edges()) if len(cycle) > 1]


def test_sub_packages_do_not_import_each_other_in_cycles(tree):
    assert not [cycle for cycle in components(tree.sub_package_edges()) if len(cycle) > 1]


@pytest.mark.parametrize("package", ORDER_INSIDE)
def test_sub_packages_import_the_earlier_ones(tree, package):
    parts = ORDER_INSIDE[package].split()
    level = {f"{package}.{part}".strip("."): at for at, part in enumerate(parts)}
    for source, targets in tree.sub_package_edges().items():
        for target in targets if source.split(".")[0] == package else ():
            assert level[target] < level[source], f"{source} imports {target}"


def test_other_packages_are_imported_by_their_public_surface(tree):
    # tools/walks.py measures calls behind the surface of offload.
    assert not [each for each in code_counts.past_surface(tree) if each.source != "tools.walks"]


def test_surfaces_are_narrow(tree):
    for surface, count in surfaces(tree).items():
        assert count <= MOST_NAMES, f"other packages import {count} names from {surface}"


def test_chains_of_imports_stay_short(tree):
    """A reader may have to open every module along a chain."""
    depths = import_depths(tree.edges())
    deepest = max(depths, key=lambda module: depths[module])
    assert depths[deepest] <= LONGEST_CHAIN, f"{deepest} is behind {depths[deepest]} modules"


def _calls(node, name, *, in_classes):
    """Yield the lines of a function's calls."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == name:
            yield each.lineno
        if in_classes or not isinstance(each, ast.ClassDef):
            yield from _calls(each, name, in_classes=in_classes)


def test_only_node_classes_look_the_host_up(nodes):
    """Functions get the host, or the part they need, as an argument."""
    for place, module in nodes[ast.Module]:
        forbidden = _calls(module, "current_host", in_classes=place.parts[0] != "nodes")
        assert [*forbidden] == [], place


@pytest.mark.parametrize("package", sorted({*PACKAGES} - {"cli", "tools"}))
def test_public_surfaces_list_their_names(tree, package):
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


def test_module_docstrings_start_with_a_noun_or_a_verb(nodes):
    for place, module in nodes[ast.Module]:
        docstring = ast.get_docstring(module)
        assert docstring, place
        assert not re.match(r"(What|Which|Where|Whether|How|Who)\b", docstring), place
        assert place.stem not in {"utils", "common", "helpers", "manager"}, place


def _docstrings(nodes):
    for kind in (ast.Module, ast.ClassDef, ast.FunctionDef):
        for place, node in nodes[kind]:
            yield place, node, ast.get_docstring(node) or ""


def test_docstrings_name_errors_that_exist(nodes):
    known = set(vars(builtins)) | {"OutOfMemoryError"}  # the last comes from torch
    known |= {node.name for _, node in nodes[ast.ClassDef]}
    for place, _, text in _docstrings(nodes):
        assert set(re.findall(r"\b[A-Z]\w+Error\b", text)) <= known, place


def _documented_function(node: ast.AST) -> ast.AST:
    """Return a class's constructor, if there is one, or the node itself."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return next((each for each in body if getattr(each, "name", "") == "__init__"), node)


def test_docstrings_describe_arguments_that_exist(nodes):
    for place, documented, text in _docstrings(nodes):
        node = _documented_function(documented)
        if isinstance(node, ast.FunctionDef):
            _, _, section = text.partition("Args:\n")
            described = re.findall(r"^    (\w+): ", section.split("\n\n")[0], re.MULTILINE)
            arguments = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            assert set(described) <= arguments, f"{place}:{node.lineno}"


def test_only_one_file_may_synchronise_a_device(nodes):
    found = {place.as_posix() for place, node in nodes[ast.Attribute] if node.attr == "synchronize"}
    # A fetch or read thread may wait for its own copies.
    own = {"offload/transfers/cuda.py", "offload/host_memory/device_slots.py"}
    assert found <= {"devices/clock.py", *own}


def test_only_devices_calls_the_modules_of_a_device(nodes):
    """Others use devices.DeviceRuntime."""
    families = {"cuda", "xpu", "mps", "accelerator"}
    found = [
        f"{place}:{node.lineno}"
        for place, node in nodes[ast.Attribute]
        if node.attr in families and ast.unparse(node.value) == "torch"
        if place.parts[0] != "devices"
    ]
    assert found == []


def test_plan_command_starts_without_torch(tree):
    """Importing torch takes seconds, and importing a module runs every `__init__` above it."""
    at_start: dict[str, set[str]] = {}
    for found in tree.imports:
        if not found.in_function and not found.for_types:
            parts = found.target.split(".")
            above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            at_start.setdefault(found.source, set()).update(above)
    reached = {"cli.plan"}
    while more := {target for module in reached for target in at_start.get(module, ())} - reached:
        reached |= more
    paths = (tree.modules[module] for module in reached & tree.modules.keys())
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    assert [path for path, text in texts.items() if re.search("^import torch", text, re.M)] == []
