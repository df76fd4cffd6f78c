"""Workers behind Ray: connection, placement, actors and cleanup."""
