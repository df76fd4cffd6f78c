"""`wanstream make-test-model`: writes a tiny random model, whole or for some workflows."""

from __future__ import annotations

import sys

from ..host.embedded import api_prompt
from .arguments import DONE, FAILED, INVALID, ArgumentError, read_json
from .options import ModelOptions


def make_test_model(options: ModelOptions) -> int:
    """Write the model, print its summary, and return the exit code."""
    from ..testing import TinyModelError, model_names, write_tiny_model  # imports torch, which takes seconds

    names: set[str] = set()
    for path in options.workflows:
        try:
            content = read_json(path)
        except ArgumentError as err:
            print(err, file=sys.stderr)
            return INVALID
        try:
            names |= model_names(api_prompt(content))
        except ValueError as err:
            print(f"{path}: {err}", file=sys.stderr)
            return INVALID
    try:
        model = write_tiny_model(
            options.folder,
            names=names if options.workflows else None,
            on_progress=lambda part: print(part, file=sys.stderr),
        )
    except TinyModelError as err:
        print(err, file=sys.stderr)
        return FAILED
    print(model.summary())
    return DONE
