"""Host memory: RAM slots, page-locking, memory shared between processes."""
