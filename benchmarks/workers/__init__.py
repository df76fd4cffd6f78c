"""Several GPUs: batches on servers and actors, and the traffic of workers."""
