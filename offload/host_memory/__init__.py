"""Host memory: slots of RAM, page-locking, memory shared between processes."""
