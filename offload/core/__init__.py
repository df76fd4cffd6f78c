"""Memory, states and threads shared by all parts of the engine."""
