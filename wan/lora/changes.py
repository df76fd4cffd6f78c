"""Parameter changes in a LoRA file, built from the tensors of each layer.

| algorithm | weight change                                                                                  |
|-----------|------------------------------------------------------------------------------------------------|
| LoRA      | `up @ down`, a difference                                                                      |
| LoKr      | Kronecker product w1 x w2, each a matrix or a product of two (w2 with `t2`: of three)          |
| LoHa      | elementwise product w1 * w2, each a product of two factors (with `t1`, `t2`: three)            |
| DoRA      | one of these, then every row (or column) of the sum gets the norm `magnitude`                  |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from ...offload import FileTensor
from ..checkpoint.files import CheckpointError
from .keys import Role
from .settings import AdapterSettings

Roles = Mapping[Role, str]
"""Tensor keys of one parameter, by role."""

Tensors: TypeAlias = "Mapping[str, FileTensor]"

Factors = tuple[str, ...]
"""Factor keys of a matrix: the matrix alone, two factors to multiply, or two and a Tucker core.

With a core, the first two are [rank, rows] and [rank, columns], and the core is [rank, rank, ...].
"""

Matrix = Literal["lokr_w1", "lokr_w2", "hada_w1", "hada_w2"]

FORMS: Mapping[Matrix, tuple[tuple[Role, ...], ...]] = {
    "lokr_w1": (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")),
    "lokr_w2": (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b", "lokr_t2"), ("lokr_w2_a", "lokr_w2_b")),
    "hada_w1": (("hada_w1_a", "hada_w1_b", "hada_t1"), ("hada_w1_a", "hada_w1_b")),
    "hada_w2": (("hada_w2_a", "hada_w2_b", "hada_t2"), ("hada_w2_a", "hada_w2_b")),
}
"""Factor roles per matrix. The first complete form counts."""

OTHER_FACTOR: Mapping[Role, Role] = {"up": "down", "down": "up"}

NAMES = {"lokr": "LoKr", "hada": "LoHa"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Parameter change, multiplied by `scale`. With a `magnitude` it is a DoRA."""

    kind: Literal["sum", "kronecker", "hadamard"] = "sum"
    """A "sum" adds the matrix `first`."""
    first: Factors
    second: Factors = ()
    scale: float
    magnitude: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All tensor keys."""
        return (*self.first, *self.second, *(() if self.magnitude is None else (self.magnitude,)))

    @property
    def is_difference(self) -> bool:
        """True if the file has the whole change, in the parameter's shape."""
        return self.kind == "sum" and len(self.first) == 1

    @property
    def is_product(self) -> bool:
        """True for a product of two matrices."""
        return self.kind == "sum" and len(self.first) == 2 and self.magnitude is None

    @property
    def is_summed_in_fp32(self) -> bool:
        """True if the sum with the weight takes work memory."""
        return self.kind == "hadamard" or self.magnitude is not None

    @property
    def algorithm(self) -> str:
        """Algorithm name, for messages."""
        if self.magnitude is not None:
            return "a DoRA"
        names = {"kronecker": "a LoKr", "hadamard": "a LoHa", "sum": "a LoRA"}
        return "a difference" if self.is_difference else names[self.kind]

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """Return rows and columns of the changed weight. All kernel dimensions count as columns."""
        first = matrix_shape(tensors, self.first)
        if self.kind != "kronecker":
            return first
        second = matrix_shape(tensors, self.second)
        return first[0] * second[0], first[1] * second[1]


def matrix_shape(tensors: Tensors, factors: Factors) -> tuple[int, int]:
    """Return rows and columns of a matrix, from the factor shapes."""
    shapes = [tensors[key].shape for key in factors]
    if len(shapes) == 3:
        (_, rows), (_, columns), core = shapes
        return rows, columns * math.prod(core[2:])
    return shapes[0][0], math.prod(shapes[-1][1:])


def is_by_column(magnitude: tuple[int, ...], columns: int) -> bool:
    """Return True if this magnitude shape has a number for each weight column, not for each row."""
    return len(magnitude) > 1 and magnitude[0] == 1 and math.prod(magnitude) == columns


def changes_of(
    path: Path, tensors: Tensors, parts: Mapping[str, Roles], alphas: Mapping[str, float], settings: AdapterSettings
) -> dict[str, tuple[Change, ...]]:
    """Return the changes of each changed parameter. A lone alpha is not a change.

    Args:
        path: the file, for messages.
        tensors: file tensors by key.
        parts: keys by parameter and role.
        alphas: alpha values by key.
        settings: settings for layers without an alpha.

    Raises:
        CheckpointError: the tensors of a layer are incomplete or do not belong together. The message has the keys.
    """
    found: dict[str, tuple[Change, ...]] = {}
    for parameter, roles in parts.items():
        layer = _Layer(path, tensors, roles, alphas.get(roles.get("alpha", "")), settings, parameter)
        changes = tuple(layer.changes())
        if changes:
            found[parameter] = changes
    for parameter, roles in parts.items():
        if "up bias" in roles:
            # The bias belongs to the `up` layer, so it has the same scale as the product.
            weight = found.get(parameter.removesuffix("bias") + "weight", ())
            scale = next((change.scale for change in weight if len(change.first) == 2), 1.0)
            if "diff" in roles:
                raise CheckpointError(path, f"{roles['diff']} and {roles['up bias']} mean the same")
            found[parameter] = (Change(first=(roles["up bias"],), scale=scale),)
    if settings.needs_magnitudes and not any(change.magnitude for each in found.values() for change in each):
        raise CheckpointError(path, "is a DoRA by its settings (use_dora), but has no magnitudes: convert it again")
    return found


@dataclass(frozen=True)
class _Layer:
    """Tensors of one parameter."""

    path: Path
    tensors: Tensors
    roles: Roles
    alpha: float | None
    settings: AdapterSettings
    parameter: str

    def changes(self) -> Iterator[Change]:
        products = [change for change in (self._lora(), self._lokr(), self._loha()) if change is not None]
        if len(products) > 1:
            self._refuse(f"has two algorithms for one layer: {products[0].first[0]} and {products[1].first[0]}")
        if "diff" in self.roles:
            products.append(Change(first=(self.roles["diff"],), scale=1.0))
        if "magnitude" in self.roles:
            if not products:
                self._refuse(f"{self.roles['magnitude']} is the magnitude of a DoRA without the factors of its layer")
            products[0] = self._with_magnitude(products[0], self.roles["magnitude"])
        yield from products

    def _lora(self) -> Change | None:
        if "up" not in self.roles and "down" not in self.roles:
            return None
        for role, other in OTHER_FACTOR.items():
            if role not in self.roles:
                self._refuse(f"{self.roles[other]} has no {role} factor: download or convert the file again")
        first = (self.roles["up"], self.roles["down"])
        return Change(first=first, scale=self._scale(self._rank(first)))

    def _lokr(self) -> Change | None:
        if not self._has("lokr"):
            return None
        first = self._factors("lokr_w1")
        second = self._factors("lokr_w2")
        # LyCORIS scales by the rank of the second matrix if it has one, else of the first. With two whole matrices the
        # alpha has no effect.
        ranks = [self._rank(factors) for factors in (second, first) if len(factors) > 1]
        scale = 1.0 if not ranks and self.alpha is not None else self._scale(ranks[0] if ranks else None)
        return Change(kind="kronecker", first=first, second=second, scale=scale)

    def _loha(self) -> Change | None:
        if not self._has("hada"):
            return None
        first = self._factors("hada_w1")
        second = self._factors("hada_w2")
        rank = self._rank(first)
        self._rank(second)
        shapes = [matrix_shape(self.tensors, factors) for factors in (first, second)]
        if shapes[0] != shapes[1]:
            self._refuse(f"{first[0]} and {second[0]} belong to matrices of {list(shapes[0])} and {list(shapes[1])}")
        return Change(kind="hadamard", first=first, second=second, scale=self._scale(rank))

    def _has(self, algorithm: str) -> bool:
        return any(role.startswith(algorithm) for role in self.roles)

    def _factors(self, matrix: Matrix) -> Factors:
        """Return the keys of one LoKr or LoHa matrix."""
        form = next((form for form in FORMS[matrix] if all(role in self.roles for role in form)), None)
        if form is None:
            algorithm = matrix[:4]
            key = next(key for role, key in self.roles.items() if role.startswith(algorithm))
            wanted = " or ".join(" and ".join(form) for form in FORMS[matrix])
            self._refuse(
                f"is a {NAMES[algorithm]} with a part missing: {key} needs {wanted} of the same layer: download or "
                "convert the file again"
            )
        factors = tuple(self.roles[role] for role in form)
        for key in factors:
            if len(self.tensors[key].shape) < 2 or 0 in self.tensors[key].shape:
                self._refuse(f"{key} is {list(self.tensors[key].shape)}: a matrix is expected")
        return factors

    def _rank(self, factors: Factors) -> int:
        """Return the factors' common rank. Refuse factors that are not matrices or have different ranks."""
        shapes = [self.tensors[key].shape for key in factors]
        one, other = factors[:2]
        if any(len(shape) < 2 or 0 in shape for shape in shapes):
            self._refuse(f"{one} is {list(shapes[0])} and {other} is {list(shapes[1])}: matrices are expected")
        if len(shapes) == 3:
            rank = shapes[1][0]
            if (len(shapes[0]), len(shapes[1])) != (2, 2) or shapes[2][:2] != (shapes[0][0], rank):
                self._refuse(f"{factors[2]} is {list(shapes[2])}; [{shapes[0][0]}, {rank}, ...] is expected")
            return rank
        rank = shapes[1][0]
        if math.prod(shapes[0][1:]) != rank:
            self._refuse(
                f"mixed ranks: {one} {list(shapes[0])} has rank {math.prod(shapes[0][1:])}, {other} {list(shapes[1])} "
                f"has rank {rank}; the factors of a layer share one"
            )
        return rank

    def _scale(self, rank: int | None) -> float:
        return self.settings.scale(self.parameter.removesuffix(".weight"), rank, self.alpha)

    def _with_magnitude(self, change: Change, key: str) -> Change:
        rows, columns = change.shape(self.tensors)
        shape = self.tensors[key].shape
        if math.prod(shape) != rows and not is_by_column(shape, columns):
            self._refuse(
                f"{key} is {list(shape)}; a magnitude for each of {rows} rows or {columns} columns is expected"
            )
        return replace(change, magnitude=key)

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason)
