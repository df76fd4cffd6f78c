"""The machine around the devices: RAM, page locks and the folder of caches."""

from .available_ram import available_bytes, insufficient_ram, limited_groups
from .cache_files import cache_folder, sync_folder, write_json, write_whole
from .shared_pages import PageLock

__all__ = [
    "PageLock",
    "available_bytes",
    "cache_folder",
    "insufficient_ram",
    "limited_groups",
    "sync_folder",
    "write_json",
    "write_whole",
]
