"""Expert pairs and single models: opening, offload engine, embedders, registry."""
