"""Parameter changes in a LoRA file, built from each layer's tensors.

| algorithm | weight change                                                                       |
|-----------|-------------------------------------------------------------------------------------|
| LoRA      | `up @ down`, a difference                                                           |
| LoKr      | Kronecker product w1 x w2, each a matrix or product of two (w2 with `t2`: of three) |
| LoHa      | elementwise product w1 * w2, each a product of two factors (with `t1`, `t2`: three) |
| DoRA      | one of these, then every row (or column) of the sum gets the norm `magnitude`       |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from ...offload.formats import FileTensor
from ..checkpoint.files import CheckpointError
from .keys import FORMS, Matrix, Role
from .settings import AdapterSettings

Roles = Mapping[Role, str]
"""Tensor keys by role, for one parameter."""

Tensors: TypeAlias = "Mapping[str, FileTensor]"

Factors = tuple[str, ...]
"""Factor keys of a matrix: the matrix alone, two factors to multiply, or two and a Tucker core.

With a core, the first two are [rank, rows] and [rank, columns], and the core is [rank, rank, ...].
"""

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
        return (*self.first, *self.second, *filter(None, [self.magnitude]))

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
        if self.is_difference:
            return "a difference"
        return {"kronecker": "a LoKr", "hadamard": "a LoHa", "sum": "a LoRA"}[self.kind]

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
    """Return True if this magnitude shape has a number per weight column, not per row."""
    return len(magnitude) > 1 and magnitude[0] == 1 and math.prod(magnitude) == columns


def changes_of(
    path: Path,
    tensors: Tensors,
    parts: Mapping[str, Roles],
    alphas: Mapping[str, float],
    settings: AdapterSettings,
) -> dict[str, tuple[Change, ...]]:
    """Return the changes by changed parameter. A lone alpha is not a change.

    Args:
        path: the file, for messages.
        tensors: file tensors by key.
        parts: keys by parameter and role.
        alphas: alpha values by key.
        settings: settings for layers without an alpha.

    Raises:
        CheckpointError: a layer's tensors are incomplete or do not belong together. The message has
            the keys.
    """
    found: dict[str, tuple[Change, ...]] = {}
    for parameter, roles in parts.items():
        alpha = alphas.get(roles.get("alpha", ""))
        changes = _Layer(path, tensors, roles, alpha, settings, parameter).changes()
        if changes:
            found[parameter] = tuple(changes)
    # After all weights, because a file may list a bias before its weight.
    for parameter, roles in parts.items():
        if "up bias" in roles:
            # The bias belongs to the `up` layer, so it has the same scale as the product.
            weight = found.get(parameter.removesuffix("bias") + "weight", ())
            scale = next((change.scale for change in weight if len(change.first) == 2), 1.0)
            if "diff" in roles:
                raise CheckpointError(path, f"{roles['diff']} and {roles['up bias']} mean the same")
            found[parameter] = (Change(first=(roles["up bias"],), scale=scale),)
    if settings.needs_magnitudes and not any(
        change.magnitude for each in found.values() for change in each
    ):
        raise CheckpointError(
            path, "is a DoRA by its settings (use_dora), but has no magnitudes: convert it again"
        )
    return found


@dataclass(frozen=True)
class _Layer:
    """Tensors for one parameter."""

    path: Path
    tensors: Tensors
    roles: Roles
    alpha: float | None
    settings: AdapterSettings
    parameter: str

    def changes(self) -> list[Change]:
        products = [*filter(None, (self._lora(), self._lokr(), self._loha()))]
        if len(products) > 1:
            one, other, *_ = (product.first[0] for product in products)
            self._refuse(f"has two algorithms for one layer: {one} and {other}")
        if "diff" in self.roles:
            products.append(Change(first=(self.roles["diff"],), scale=1.0))
        if "magnitude" in self.roles:
            key = self.roles["magnitude"]
            if not products:
                self._refuse(f"{key} is the magnitude of a DoRA without the factors of its layer")
            products[0] = self._with_magnitude(products[0], key)
        return products

    def _lora(self) -> Change | None:
        if "up" not in self.roles and "down" not in self.roles:
            return None
        for role, other in OTHER_FACTOR.items():
            if role not in self.roles:
                self._refuse(
                    f"{self.roles[other]} has no {role} factor: download or convert the file again"
                )
        first = (self.roles["up"], self.roles["down"])
        return Change(first=first, scale=self._scale(self._rank(first)))

    def _lokr(self) -> Change | None:
        if not any(role.startswith("lokr") for role in self.roles):
            return None
        first = self._factors("lokr_w1")
        second = self._factors("lokr_w2")
        # LyCORIS scales by the second matrix's rank if it has one, else by the first's. With two
        # whole matrices the alpha has no effect.
        ranks = [self._rank(factors) for factors in (second, first) if len(factors) > 1]
        scale = 1.0
        if ranks or self.alpha is None:
            scale = self._scale(next(iter(ranks), None))
        return Change(kind="kronecker", first=first, second=second, scale=scale)

    def _loha(self) -> Change | None:
        if not any(role.startswith("hada") for role in self.roles):
            return None
        first = self._factors("hada_w1")
        second = self._factors("hada_w2")
        rank = self._rank(first)
        self._rank(second)
        one, other = (list(matrix_shape(self.tensors, factors)) for factors in (first, second))
        if one != other:
            self._refuse(f"{first[0]} and {second[0]} belong to matrices of {one} and {other}")
        return Change(kind="hadamard", first=first, second=second, scale=self._scale(rank))

    def _factors(self, matrix: Matrix) -> Factors:
        """Return the keys of one LoKr or LoHa matrix."""
        form = next((form for form in FORMS[matrix] if self.roles.keys() >= {*form}), None)
        if form is None:
            algorithm = matrix[:4]
            key = next(key for role, key in self.roles.items() if role.startswith(algorithm))
            wanted = " or ".join(" and ".join(form) for form in FORMS[matrix])
            self._refuse(
                f"is a {NAMES[algorithm]} with a part missing: {key} needs {wanted} of the same "
                "layer: download or convert the file again"
            )
        factors = tuple(self.roles[role] for role in form)
        for key in factors:
            if len(self.tensors[key].shape) < 2 or 0 in self.tensors[key].shape:
                self._refuse(f"{key} is {list(self.tensors[key].shape)}: a matrix is expected")
        return factors

    def _rank(self, factors: Factors) -> int:
        """Return the factors' common rank.

        Refuse factors that are not matrices or have different ranks.
        """
        up, down, *core = (list(self.tensors[key].shape) for key in factors)
        one, other = factors[:2]
        if any(len(shape) < 2 or 0 in shape for shape in (up, down, *core)):
            self._refuse(f"{one} is {up} and {other} is {down}: matrices are expected")
        rank = down[0]
        if core:
            if (len(up), len(down)) != (2, 2) or core[0][:2] != [up[0], rank]:
                self._refuse(f"{factors[2]} is {core[0]}; [{up[0]}, {rank}, ...] is expected")
        # The up factor of a convolution is [rows, rank, 1, 1].
        elif math.prod(up[1:]) != rank:
            self._refuse(
                f"mixed ranks: {one} {up} has rank {math.prod(up[1:])}, {other} {down} has rank "
                f"{rank}; the factors of a layer share one"
            )
        return rank

    def _scale(self, rank: int | None) -> float:
        return self.settings.scale(self.parameter.removesuffix(".weight"), rank, self.alpha)

    def _with_magnitude(self, change: Change, key: str) -> Change:
        rows, columns = change.shape(self.tensors)
        shape = self.tensors[key].shape
        if math.prod(shape) != rows and not is_by_column(shape, columns):
            self._refuse(
                f"{key} is {list(shape)}; a magnitude for each of {rows} rows or {columns} columns "
                "is expected"
            )
        return replace(change, magnitude=key)

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason)
