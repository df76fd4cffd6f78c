"""Removal of single waits, event records and unlocks from the product, without file changes.

Each function with such a call is compiled with a switch in front of it. Inside
`Mutations.installed`, the product runs with these functions, and `removed` selects the calls to
leave out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

_MODULES = """
    devices.clock devices.machine.shared_pages offload.core.pages offload.engine.block_pool
    offload.engine.run offload.host_memory.device_slots offload.host_memory.in_place
    offload.host_memory.ram_run offload.host_memory.ram_slots offload.transfers.base
    offload.transfers.cuda offload.transfers.patches
"""
_CALLS = """
    _await_read _unlock_all await_issued await_released begin_run drained end_run join record settle
    synchronize unlock_pages wait wait_event wait_for wait_stream
"""
MODULES = _MODULES.split()
CALLS = {*_CALLS.split()}
"""Functions and methods whose calls are removed, whatever they are called on."""
CALLS_ON = {"self._locked.release", "self._locked.remove", "self.backend.close"}
"""Methods whose calls are removed if they are called on this."""
KEPT = {
    "self._recorder.begin_run",
    "self._recorder.end_run",
    "self._filled.wait",
    "', '.join",
    "torch.get_device_module(self._family).synchronize",
}
"""Calls only named like a wait, waits for RAM, and the wait for devices without streams, covered by
`test_synchronous.py`."""
LOOPS = {"after", "self._streams"}
"""Loops over streams or events: each round is removed alone, and all together."""

SWITCH = "_is_removed"
ROUND = "_round"
EVERY_ROUND = -1


class Mutation(NamedTuple):
    """One removable call."""

    site: str
    """The function's qualified name and the call's text. A number distinguishes equal calls in a
    function."""
    owner: str = ""
    """Class of the object, if it is a subclass of the one with the method."""
    round: int | None = None
    """Loop round, `EVERY_ROUND` for all rounds, or None outside loops."""

    def __str__(self) -> str:
        rounds = {None: "", EVERY_ROUND: "every round"}.get(self.round, f"round {self.round}")
        more = ", ".join(part for part in (self.owner, rounds) if part)
        return f"{self.site} [{more}]" if more else self.site


class _Switches(ast.NodeTransformer):
    """Puts a switch in front of every removable call."""

    def __init__(self) -> None:
        self.sites: dict[str, tuple[str, ...]] = {}
        """The function's path in the module, by site."""
        self._path: tuple[str, ...] = ()
        self._method_of = ""
        self._counts: Counter[str] = Counter()
        self._rounds = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before = self._path
        self._path = (*before, node.name)
        self._method_of = node.name
        self.generic_visit(node)
        self._path = before
        self._method_of = ""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        depth = 2 if self._method_of else 1
        if len(self._path) == depth:  # a function in a function is part of it
            return self.generic_visit(node)
        before = self._path
        self._path = (*before, node.name)
        self.generic_visit(node)
        self._path = before
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        if ast.unparse(node.iter) not in LOOPS:
            return self.generic_visit(node)
        self._rounds += 1
        node.body = [self.visit(each) for each in node.body]
        self._rounds -= 1
        enumerated = ast.Call(func=ast.Name("enumerate", ast.Load()), args=[node.iter], keywords=[])
        target = ast.Tuple([ast.Name(ROUND, ast.Store()), node.target], ast.Store())
        loop = ast.For(target=target, iter=enumerated, body=node.body, orelse=node.orelse)
        return ast.copy_location(loop, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        text = ast.unparse(node)
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(argument) for argument in node.keywords]
        named = called.rpartition(".")[2] in CALLS and called not in KEPT
        removable = self._path and (named or called in CALLS_ON)
        return self._switched(node, ast.Constant(None), text) if removable else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr != "synchronize":
            return self.generic_visit(node)
        # Not called here, but passed on to be called later.
        nothing = ast.Lambda(_NO_ARGUMENTS, ast.Constant(None))
        return self._switched(node, nothing, ast.unparse(node))

    def _switched(self, node: ast.expr, replaced: ast.expr, text: str) -> ast.IfExp:
        site = f"{'.'.join(self._path)}: {text}"
        self._counts[site] += 1
        if self._counts[site] > 1:
            site += f" #{self._counts[site]}"
        self.sites[site] = self._path
        owner: ast.expr = ast.Name("self", ast.Load()) if self._method_of else ast.Constant(None)
        of_loop: ast.expr = ast.Name(ROUND, ast.Load()) if self._rounds else ast.Constant(None)
        arguments = [ast.Constant(site), ast.Constant(self._method_of), owner, of_loop]
        switch = ast.Call(func=ast.Name(SWITCH, ast.Load()), args=arguments, keywords=[])
        return ast.copy_location(ast.IfExp(test=switch, body=replaced, orelse=node), node)


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


@dataclass(frozen=True)
class _Change:
    module: ModuleType
    function: FunctionType
    code: CodeType


class Mutations:
    """All removable calls in the product.

    Attributes:
        sites: calls, without their classes and rounds.
        removed: the calls left out inside `installed`.
        reached: calls made or left out inside `installed`.
        cancelled: make all threads raise at their next such call, to end the threads of a hung
            test.
    """

    def __init__(self) -> None:
        self.sites: list[str] = []
        self.removed: set[Mutation] = set()
        self.reached: set[Mutation] = set()
        self.cancelled = False
        self._changes: list[_Change] = []
        for name in MODULES:
            self._add_module(importlib.import_module(f"wanstream.{name}"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the product with switches inside the `with`."""
        with pytest.MonkeyPatch.context() as patched:
            for change in self._changes:
                patched.setattr(change.module, SWITCH, self._is_removed, raising=False)
                patched.setattr(change.function, "__code__", change.code)
            yield

    def _is_removed(self, site: str, method_of: str, owner: object, of_loop: int | None) -> bool:
        if self.cancelled:
            raise RuntimeError("cancelled")
        cls = type(owner).__name__
        mutation = Mutation(site, "" if owner is None or cls == method_of else cls, of_loop)
        found = {mutation} if of_loop is None else {mutation, mutation._replace(round=EVERY_ROUND)}
        self.reached |= found
        return not self.removed.isdisjoint(found)

    def _add_module(self, module: ModuleType) -> None:
        file = inspect.getsourcefile(module)
        switches = _Switches()
        tree = switches.visit(ast.parse(Path(file).read_text(encoding="utf-8")))
        ast.fix_missing_locations(tree)
        code = compile(tree, file, "exec", dont_inherit=True)
        self.sites += switches.sites
        for path in sorted(set(switches.sites.values())):
            self._changes.append(_Change(module, _function(module, path), _code(code, path)))


def _function(module: ModuleType, path: tuple[str, ...]) -> FunctionType:
    found: Any = module
    for name in path:
        found = vars(found)[name]
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    assert isinstance(found, FunctionType)
    return found


def _code(code: CodeType, path: tuple[str, ...]) -> CodeType:
    for name in path:
        [code] = [each for each in code.co_consts if getattr(each, "co_name", "") == name]
    return code
