"""Batches on actors of Ray: the backends of the driver, and the service in the process of each actor."""
