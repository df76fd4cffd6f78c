"""`wanstream selftest`: checks that streaming works on one device, and measures it."""
