"""`wanstream make-test-model`: writes a tiny random model, whole or for some workflows."""

from __future__ import annotations

from ..host.embedded import api_prompt
from .arguments import DONE, FAILED, ArgumentError, read_json
from .options import ModelOptions
from .terminal import print_note


def make_test_model(options: ModelOptions) -> int:
    """Write the model, print its summary, and return the exit code. Raises ArgumentError."""
    # Imports torch, which takes seconds.
    from ..testing import TinyModelError, model_names, write_tiny_model

    names: set[str] = set()
    for path in options.workflows:
        content = read_json(path)
        try:
            names |= model_names(api_prompt(content))
        except ValueError as err:
            raise ArgumentError(f"{path}: {err}") from err
    try:
        # Without workflows, None stands for all files. An empty set would write no file.
        model = write_tiny_model(
            options.folder, names=names if options.workflows else None, on_progress=print_note
        )
    except TinyModelError as err:
        print_note(err)
        return FAILED
    print(model.summary())
    return DONE
