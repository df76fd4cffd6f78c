"""L7: the `wanstream` command."""
