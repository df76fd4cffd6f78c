"""Transfer backends: copies from RAM into buffers, one backend per kind of device."""
