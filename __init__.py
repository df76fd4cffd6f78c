"""WanStream: Wan2.2 A14B with both experts streamed through a few buffers.

ComfyUI loads this file, so importing it loads nothing else. Scripts import from `wanstream.plan`,
`wanstream.wan` and `wanstream.sampling`.
"""

TYPE_CHECKING = (
    False  # type checkers read it as True; importing typing's constant would load typing
)

if TYPE_CHECKING:
    from .nodes import WanStreamExtension

WEB_DIRECTORY = "./web"

__version__ = "0.1.0"


async def comfy_entrypoint() -> "WanStreamExtension":
    """Return the node list; called by ComfyUI after the import of this package."""
    import logging

    # Imported in here: a script that imports `wanstream.plan` needs neither torch nor ComfyUI.
    try:
        from .host import current_host, name_errors_of
        from .nodes import WanStreamExtension

        extension = WanStreamExtension()
        nodes = await extension.get_node_list()
        for node in nodes:
            name_errors_of(node)
        current_host().events.open_to_browsers(nodes)
    except Exception:
        # ComfyUI prints one line without a traceback for an error in here.
        logging.getLogger("wanstream").exception("WanStream could not be loaded")
        raise
    return extension
