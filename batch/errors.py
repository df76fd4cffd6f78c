"""Batch errors: at the start, and in backend requests."""


class SetupError(ValueError):
    """The batch cannot start with these rows, folders or backends. Nothing was run."""


class UnreachableError(OSError):
    """No response, or an incomplete one: the request may have been executed or not.

    A retry may succeed.
    """


class BackendTimeoutError(OSError):
    """No backend has responded within the time limit."""


class ForeignResponseError(ValueError):
    """Another program responds at the backend's address.

    A retry may succeed while the backend restarts.
    """


class UnsuitableError(ValueError):
    """The backend cannot run the batch.

    It lacks a node, a model or free space, has another version, or is broken.
    """


class BrokenDeviceError(OSError):
    """The device of this process has failed, and the CUDA context with it.

    No row can be computed before a restart.
    """


class RefusedError(ValueError):
    """The backend refuses a workflow. The message contains the reason."""


class NoSuchFileError(ValueError):
    """The backend does not have a file that it has listed as output."""
