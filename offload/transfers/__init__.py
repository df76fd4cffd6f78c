"""Transfer backends: copies from RAM into buffers, one backend per device kind."""
