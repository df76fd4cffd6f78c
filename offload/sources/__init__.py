"""Weight sources: checkpoint files, modules, and weights quantised while they are read."""
