"""`wanstream batch`, and the backends that compute with this package: embedded host, Ray actors."""
