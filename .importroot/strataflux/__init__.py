"""StrataFlux: precision for low-bit language models, served from a slower tier when it matters."""
