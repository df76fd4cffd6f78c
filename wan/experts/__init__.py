"""Expert pairs and single models: opening, offload engine, registry, mismatches."""
