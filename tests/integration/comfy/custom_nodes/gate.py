"""A custom node for tests: `TestGate` keeps the server busy until a file appears."""

import pathlib
import time


class TestGate:
    RETURN_TYPES = ("STRING",)
    FUNCTION = "wait"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {})}}

    def wait(self, file):
        while not pathlib.Path(file).exists():
            time.sleep(0.02)
        return (file,)


NODE_CLASS_MAPPINGS = {"TestGate": TestGate}
