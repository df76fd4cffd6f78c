"""Ray: connection, placement, worker actors, cleanup."""
