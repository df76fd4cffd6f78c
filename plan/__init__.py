"""L0: decides. Standard library only; values in, frozen dataclasses out."""
