"""File tensors to rename, slice and reshape without reading them, and their places in the file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..formats.gguf_header import read_gguf_header
from ..formats.packing import QuantFormat
from ..formats.safetensors_header import FileTensor, read_header
from .file import read_tensors

GGUF = ".gguf"
PACKED_DTYPE = torch.bfloat16
"""Dtype for packed tensors, which have no values here."""

_LIKE = (f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"))
_NEW = (f"new_{name}" for name in ("empty", "zeros", "ones", "full", "empty_strided"))
_WITHOUT_VALUES = frozenset({*_LIKE, *_NEW})
"""Operations on a tensor's shape, dtype and device, but not on values."""


class StoredTensor(torch.Tensor):
    """CPU tensor with values in the file.

    Every operation that needs the values reads them.

    Not a memory mapping: if the file was cut, touching a page behind the end kills the process.
    Reading returns an error instead, and also notices if the file was rewritten or replaced after
    opening.

    Views are stored tensors again. An operation that needs values raises SourceError if the file
    has changed, and returns a tensor in memory. Writing raises ValueError.
    """

    place: FileTensor
    """Place in the file of the tensor behind this view."""
    shadow: torch.Tensor
    """The same view on `meta`. The meta storage begins at the first value in `place`."""
    kept: torch.Tensor | None = None
    """The values, since their address was requested."""

    @staticmethod
    def __new__(cls, place: FileTensor, shadow: torch.Tensor) -> StoredTensor:
        # Views of one tensor are made inside and outside inference mode, and all must be of one
        # kind.
        with torch.inference_mode(False):
            made: StoredTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                shadow.shape,
                strides=shadow.stride(),
                storage_offset=shadow.storage_offset(),
                dtype=shadow.dtype,
                device=torch.device("cpu"),
                requires_grad=False,
            )
        made.place = place
        made.shadow = shadow
        return made

    def read(self) -> torch.Tensor:
        """Return the values in new memory.

        Raises SourceError if the file cannot be read, or has changed.
        """
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        if self.is_contiguous():
            return read_tensors({"": self.located()})[""]
        values = 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride(), strict=True)
        )
        # The span covers everything from the first to the last value in the view.
        span = self.shadow.as_strided((values,), (1,))
        values_of_span = StoredTensor(self.place, span).read()
        return values_of_span.as_strided(self.shape, self.stride(), 0).clone()

    def read_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return these rows in new memory. Raises SourceError as `read`."""
        if not rows:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        views: dict[str, Any] = {f"row {row}": self[row] for row in rows}
        read = read_tensors({name: view.located() for name, view in views.items()})
        return torch.stack([read[f"row {row}"] for row in rows])

    def located(self) -> FileTensor:
        """Return this view's place. The view must be contiguous."""
        offset = self.place.offset + int(self.storage_offset()) * self.itemsize
        return replace(
            self.place, offset=offset, nbytes=self.nbytes, dtype=self.dtype, shape=tuple(self.shape)
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        schema = function._schema
        named = dict(kwargs or {})
        # In inference mode, composite operations arrive here whole: `to` may be a view or a copy.
        parts = function.decompose(*args, **named)
        if parts is not NotImplemented:
            return parts
        if any(isinstance(each, StoredTensor) for each in _written(schema, args, named)):
            raise ValueError(
                f"{schema.name}: a tensor that is in its file cannot be changed: clone it first"
            )
        if schema.name.partition("::")[2] in _WITHOUT_VALUES:
            # The arguments below are on `meta`. The result would be there, too.
            named["device"] = named.get("device") or "cpu"
            return function(*tree_map(_shadow, args), **tree_map(_shadow, named))
        is_view = any(each.alias_info is not None for each in schema.returns)
        if is_view and isinstance(args[0], StoredTensor):
            place = args[0].place
            made = function(*tree_map(_shadow, args), **named)
            return tree_map(
                lambda each: StoredTensor(place, each) if isinstance(each, torch.Tensor) else each,
                made,
            )
        return function(*tree_map(_values, args), **tree_map(_values, named))

    # The value address is read without an operation, so the values stay as long as this view
    # exists.

    def data_ptr(self) -> int:
        return self._kept().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._kept().untyped_storage()

    def storage(self) -> Any:
        return self._kept().storage()

    def numpy(self, *args: Any, **settings: Any) -> Any:
        return self.read().numpy(*args, **settings)

    def tolist(self) -> Any:
        return self.read().tolist()

    def _kept(self) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.read()
        return self.kept

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        # Writing raises, so copies can share the values.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredTensor({list(self.shape)}, {self.dtype}, {self.place.path.name})"


def _written(schema: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments changed by an operation."""
    for each, value in zip_longest(schema.arguments, args):
        if each.alias_info is not None and each.alias_info.is_write:
            yield named.get(each.name, value)


def _shadow(value: Any) -> Any:
    return value.shadow if isinstance(value, StoredTensor) else value


def _values(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value


class StoredFile:
    """A safetensors or GGUF file with tensors to rename, slice by rows and reshape unread.

    Plain tensors are a `StoredTensor` each. Packed GGUF tensors have the values' shape, but no
    values (they are on `meta`). They share one storage, where a view has the same place as in the
    file.

    Args:
        path: the file.

    Attributes:
        path: as above.
        tensors: tensors by file name.
        places: tensor places in the file.
        metadata: free-form file metadata.
        is_packed: True if a tensor is packed.

    Raises:
        CheckpointFileError: as `read_header` or `read_gguf_header`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path) if path.suffix.lower() == GGUF else read_header(path)
        self.metadata: Mapping[str, str] = header.metadata
        self.places: Mapping[str, FileTensor] = header.tensors
        packed = [tensor for tensor in header.tensors.values() if tensor.packing is not None]
        self.is_packed = bool(packed)
        *starts, values = accumulate((math.prod(tensor.shape) for tensor in packed), initial=0)
        self._packed = packed
        self._starts = starts
        self._values = torch.empty(values, dtype=PACKED_DTYPE, device="meta")
        self._own = {id(tensor) for tensor in header.tensors.values()}
        self._layers: dict[int, tuple[torch.Tensor, FileTensor]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        next_start = iter(starts)
        for name, tensor in header.tensors.items():
            if tensor.packing is None:
                shadow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                self.tensors[name] = StoredTensor(tensor, shadow)
            else:
                values_of_tensor = self._values[next(next_start) :][: math.prod(tensor.shape)]
                self.tensors[name] = values_of_tensor.view(tensor.shape)

    def pack(self, layer: FileTensor) -> torch.Tensor:
        """Return a tensor without values for codes and scales in this file.

        Only the whole tensor has a place.
        """
        values = torch.empty(layer.shape, dtype=PACKED_DTYPE, device="meta")
        # The tensor is kept, so no later storage gets the same address.
        self._layers[values.untyped_storage()._cdata] = values, layer
        self.is_packed = True
        return values

    def locate(self, view: torch.Tensor) -> FileTensor | None:
        """Return a contiguous view's place in the file. None for tensors from elsewhere.

        A part of a packed tensor without whole groups has no place either.
        """
        if not view.numel() or not view.is_contiguous() or not self.has(view):
            return None
        if isinstance(view, StoredTensor):
            return view.located()
        return self._locate_packed(view)

    def has(self, view: torch.Tensor) -> bool:
        """Return True for a tensor from this file, contiguous or not."""
        if isinstance(view, StoredTensor):
            return id(view.place) in self._own
        if not view.is_meta:
            return False
        storage = view.untyped_storage()._cdata
        return storage in self._layers or bool(storage == self._values.untyped_storage()._cdata)

    def _locate_packed(self, view: torch.Tensor) -> FileTensor | None:
        if (packed := self._layers.get(view.untyped_storage()._cdata)) is not None:
            whole, layer = packed
            return layer if view.shape == whole.shape else None
        index = bisect_right(self._starts, view.storage_offset()) - 1
        tensor = self._packed[index]
        start = view.storage_offset() - self._starts[index]
        packing = tensor.packing
        assert isinstance(packing, QuantFormat), f"{tensor} is not packed in a format of GGUF"
        if start % packing.values or view.numel() % packing.values:
            return None
        offset = tensor.offset + packing.bytes_of((int(start),))
        shape = tuple(view.shape)
        return replace(tensor, offset=offset, nbytes=packing.bytes_of(shape), shape=shape)
