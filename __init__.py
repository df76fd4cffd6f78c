"""WanStream: Wan2.2 A14B with both experts streamed through a few buffers.

This file is ComfyUI's way in and imports nothing by itself; `wanstream.plan`, `wanstream.wan`, `wanstream.sampling`
are the rooms for scripts.
"""

TYPE_CHECKING = False  # what type checkers look for; importing it from typing would load that module

if TYPE_CHECKING:
    from .nodes import WanStreamExtension

WEB_DIRECTORY = "./web"

__version__ = "0.1.0"


async def comfy_entrypoint() -> "WanStreamExtension":
    """Return the node list; called by ComfyUI after it has imported this package."""
    import logging

    try:
        from .host import current_host, name_errors_of
        from .nodes import WanStreamExtension

        current_host().open_to_browsers()
        extension = WanStreamExtension()
        nodes = await extension.get_node_list()
        for node in nodes:
            name_errors_of(node)
        current_host().check_prompts(nodes)
    except Exception:
        # ComfyUI prints one line without a traceback for an error in here.
        logging.getLogger("wanstream").exception("WanStream could not be loaded")
        raise
    return extension
