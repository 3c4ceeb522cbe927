"""Low-bit bases: each turns a weight matrix into codes, scales and zero-points."""
