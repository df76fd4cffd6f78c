"""Counts in the product's code: size, value classes, imports, surfaces and density.

    python -m wanstream.tools.code_counts [CHECKOUT]

Every figure is read from the syntax trees, so any commit can be counted, by the path of a checkout.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

NOT_PRODUCT = {"tests", "tools", "benchmarks", "docs", "examples", "scripts", "web", "workflows"}
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import of a module in this project."""

    source: str
    """Importing module, as a dotted name from the pack root."""
    target: str
    """Imported module. `from package import submodule` counts as the submodule."""
    name: str
    """Imported name, "" for a module."""
    line: int
    in_function: bool
    for_types: bool
    """True below `if TYPE_CHECKING:`."""


class SourceTree:
    """Modules in a checkout.

    Args:
        root: pack root.
        packages: top-level packages to read. None: the product.
    """

    def __init__(self, root: Path, packages: Iterable[str] | None = None) -> None:
        folders = packages or (
            folder.parent.name
            for folder in root.glob("*/__init__.py")
            if folder.parent.name not in NOT_PRODUCT and not folder.parent.name.startswith(".")
        )
        self.root = root
        self.packages = sorted(folders)
        self.files = sorted(
            path for package in self.packages for path in (root / package).rglob("*.py")
        )
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in self.files}
        self.modules = {self.name_of(path): path for path in self.files}

    def name_of(self, path: Path) -> str:
        """Return the dotted name of a file's module, without `__init__`."""
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports between modules, including imports inside functions and for type checkers."""
        return tuple(found for path in self.files for found in self._imports_of(path))

    def _imports_of(self, path: Path) -> Iterator[Import]:
        source = self.name_of(path)
        package = path.relative_to(self.root).parts[:-1]
        for node, in_function, for_types in _import_nodes(self.trees[path]):
            # One dot means the package itself, and each further dot a parent.
            base = package[: len(package) - node.level + 1]
            target = ".".join((*base, *(node.module or "").split("."))).strip(".")
            for alias in node.names:
                submodule = f"{target}.{alias.name}".strip(".")
                is_module = submodule in self.modules and alias.name not in self.exported(target)
                yield Import(
                    source=source,
                    target=submodule if is_module else target,
                    name="" if is_module else alias.name,
                    line=node.lineno,
                    in_function=in_function,
                    for_types=for_types,
                )

    def exported(self, package: str) -> set[str]:
        """Return the names listed in a package's `__init__`.

        One may also be the name of a submodule.
        """
        path = self.modules.get(package)
        if path is None or path.name != "__init__.py":
            return set()
        for node in self.trees[path].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return {*ast.literal_eval(node.value)}
        return set()

    @cached_property
    def definitions(self) -> dict[tuple[str, str], str]:
        """Defining module by (package, name), for names that an `__init__` re-exports."""
        exports = {
            (found.source, found.name): found.target
            for found in self.imports
            if self._is_init(found.source)
        }

        def origin(module: str, name: str) -> str:
            # A package may import a name from itself. The walk ends there.
            while (module, name) in exports and exports[module, name] != module:
                module = exports[module, name]
            return module

        return {key: origin(*key) for key in exports}

    def _is_init(self, module: str) -> bool:
        return self.modules[module].name == "__init__.py" if module in self.modules else False

    def edges(self, *, through_init: bool = True) -> dict[str, set[str]]:
        """Return imports by module. An `__init__` is replaced by the defining module."""
        edges: dict[str, set[str]] = {module: set() for module in self.modules}
        for found in self.imports:
            target = found.target
            if through_init:
                target = self.definitions.get((target, found.name), target)
            if target in edges and target != found.source:
                edges[found.source].add(target)
        if through_init:
            # Packages are left out: the defining modules stand in for them.
            edges = {
                module: targets for module, targets in edges.items() if not self._is_init(module)
            }
            edges = {
                module: {each for each in targets if each in edges}
                for module, targets in edges.items()
            }
        return edges

    def sub_package_edges(self) -> dict[str, set[str]]:
        """Return the imports between sub-packages, by package.

        A package's own modules are one sub-package.
        """
        edges: dict[str, set[str]] = {}
        for module, targets in self.edges().items():
            source = module.rpartition(".")[0]
            groups = edges.setdefault(source, set())
            for target in targets:
                group = target.rpartition(".")[0]
                edges.setdefault(group, set())
                if group != source and group.split(".")[0] == source.split(".")[0]:
                    groups.add(group)
        return edges


def _import_nodes(tree: ast.Module) -> Iterator[tuple[ast.ImportFrom, bool, bool]]:
    def walk(
        node: ast.AST, in_function: bool, for_types: bool
    ) -> Iterator[tuple[ast.ImportFrom, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            # This project imports itself relatively only.
            if isinstance(child, ast.ImportFrom) and child.level:
                yield child, in_function, for_types
                continue
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            types = for_types or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            )
            yield from walk(child, inside, types)

    return walk(tree, False, False)


def code_lines(source: str) -> int:
    """Return the number of lines with code: no blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        # A lambda's body is an expression.
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(
                getattr(statement.value, "value", None), str
            ):
                docstrings |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            # A string over several lines is one token.
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return a graph's strongly connected components, each after its targets (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                # Only a target on the stack closes a cycle. Others belong to a finished component.
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            place = stack.index(module)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return found


def import_depths(edges: dict[str, set[str]]) -> dict[str, int]:
    """Return the length of the longest import chain below each module.

    A cycle counts as one module.
    """
    depths: dict[str, int] = {}
    for component in components(edges):
        # Targets come first in this order, so their depths are known.
        below = {target for module in component for target in edges[module]} - set(component)
        depth = 1 + max((depths[target] for target in below), default=-1)
        depths.update(dict.fromkeys(component, depth))
    return depths


def mutual_packages(tree: SourceTree) -> list[tuple[str, str]]:
    """Return the pairs of sub-packages in one package that import each other."""
    edges = tree.sub_package_edges()
    return sorted(
        (one, other) for one in edges for other in edges[one] if one < other and one in edges[other]
    )


def class_fields(tree: SourceTree) -> Counter[str]:
    """Return the number of fields by dataclass and NamedTuple.

    Fields inherited from classes in this project count too.
    """
    classes = {}
    for path, module in tree.trees.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[f"{tree.name_of(path)}.{node.name}"] = node
    # Base classes are written with bare names in the source.
    by_name = {name.rsplit(".", 1)[1]: node for name, node in classes.items()}

    def is_value(node: ast.ClassDef) -> bool:
        marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
        return any(mark.startswith(("dataclass", "NamedTuple", "TypedDict")) for mark in marks)

    def count(node: ast.ClassDef) -> int:
        own = sum(
            isinstance(each, ast.AnnAssign)
            and not ast.unparse(each.annotation).startswith("ClassVar")
            for each in node.body
        )
        bases = [
            by_name[base.id]
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in by_name
        ]
        return own + sum(count(base) for base in bases if base is not node)

    return Counter({name: count(node) for name, node in classes.items() if is_value(node)})


def protocol_methods(tree: SourceTree, package: str) -> Counter[str]:
    """Return the number of methods by Protocol in a package."""
    found: Counter[str] = Counter()
    for path, module in tree.trees.items():
        for node in ast.walk(module):
            protocol = isinstance(node, ast.ClassDef) and any(
                "Protocol" in ast.unparse(base) for base in node.bases
            )
            if (
                protocol
                and isinstance(node, ast.ClassDef)
                and tree.name_of(path).startswith(package)
            ):
                methods = [
                    each
                    for each in node.body
                    if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
                ]
                found[f"{tree.name_of(path)}.{node.name}"] = len(methods)
    return found


def surfaces(tree: SourceTree) -> Counter[str]:
    """Return the number of names imported by other packages, by surface.

    A surface is a package, or a sub-package whose `__init__` lists names.
    """
    names = {(found.target, found.name) for found in _between_packages(tree)}
    return Counter(surface for surface, _ in names)


def _between_packages(tree: SourceTree) -> Iterator[Import]:
    for found in tree.imports:
        if found.target and found.target.split(".")[0] != found.source.split(".")[0]:
            yield found


def past_surface(tree: SourceTree) -> list[Import]:
    """Return imports from another package that bypass an `__init__` with a list of names."""
    return [
        found
        for found in _between_packages(tree)
        if "." in found.target and not tree.exported(found.target)
    ]


def repeated_classes(tree: SourceTree) -> list[str]:
    """Return names shared by several classes."""
    names = Counter(
        node.name
        for module in tree.trees.values()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def _is_tuple_assignment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def density(tree: SourceTree) -> dict[str, int]:
    """Return the counts of constructs that put several decisions on a line."""
    nodes = [node for module in tree.trees.values() for node in ast.walk(module)]
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    return {
        "tuple assignments": sum(map(_is_tuple_assignment, nodes)),
        "conditional expressions": sum(isinstance(node, ast.IfExp) for node in nodes),
        "nested conditional expressions": sum(
            isinstance(node, ast.IfExp)
            and any(isinstance(each, ast.IfExp) for each in (node.body, node.orelse, node.test))
            for node in nodes
        ),
        "comprehensions with two `for`s": sum(
            isinstance(node, comprehensions) and len(node.generators) > 1 for node in nodes
        ),
        "assignment expressions": sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
    }


def long_functions(tree: SourceTree, most: int = 60) -> list[str]:
    """Return functions with more than `most` lines, a remark for a reviewer."""
    return [
        f"{tree.name_of(path)}.{node.name}"
        for path, module in tree.trees.items()
        for node in ast.walk(module)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (node.end_lineno or node.lineno) - node.lineno >= most
    ]


def full_folders(tree: SourceTree, most: int = 15) -> list[str]:
    """Return folders with more than `most` modules, a remark for a reviewer."""
    modules = Counter(path.parent for path in tree.files if path.name != "__init__.py")
    return sorted(
        folder.relative_to(tree.root).as_posix()
        for folder, count in modules.items()
        if count > most
    )


def report(tree: SourceTree) -> Iterator[str]:
    """Return the report lines."""
    sizes = dict.fromkeys(tree.packages, 0)
    lines = 0
    for path in tree.files:
        source = path.read_text(encoding="utf-8")
        lines += source.count("\n")
        sizes[path.relative_to(tree.root).parts[0]] += code_lines(source)
    yield f"code lines: {sum(sizes.values())} in {len(tree.files)} files ({lines} lines)"
    yield "    " + ", ".join(f"{package} {count}" for package, count in sizes.items())
    fields = class_fields(tree)
    yield "fields, most: " + ", ".join(f"{name} {count}" for name, count in fields.most_common(8))
    yield "methods of host protocols: " + ", ".join(
        f"{name} {count}" for name, count in protocol_methods(tree, "host").most_common(5)
    )
    edges = tree.edges()
    depths = import_depths(edges)
    deepest = max(depths, key=lambda module: depths[module])
    yield (
        f"import depth: {depths[deepest]} ({deepest}), mean "
        f"{sum(depths.values()) / len(depths):.1f}"
    )
    cycles = [component for component in components(edges) if len(component) > 1]
    yield f"cycles of all imports: {len(cycles)} {cycles}"
    pairs = mutual_packages(tree)
    yield f"sub-packages that import each other: {len(pairs)} {pairs}"
    yield "names that other packages import from one surface: " + ", ".join(
        f"{surface} {count}" for surface, count in surfaces(tree).most_common(12)
    )
    past = past_surface(tree)
    yield f"imports past an `__init__`: {len(past)}"
    for found in past:
        yield f"    {found.source}:{found.line} {found.target} {found.name}"
    repeated = repeated_classes(tree)
    yield f"class names that occur twice: {len(repeated)} {repeated}"
    yield (
        f"functions over 60 lines: {long_functions(tree)}; folders over 15 modules: "
        f"{full_folders(tree)}"
    )
    for name, count in density(tree).items():
        yield f"{name}: {count} ({1000 * count / lines:.1f} per 1,000 lines)"


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    print("\n".join(report(SourceTree(checkout))))
