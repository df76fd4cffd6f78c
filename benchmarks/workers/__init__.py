"""Several GPUs: batches on servers and actors, and worker traffic."""
