"""StrataFlux: precision for low-bit language models, served from a slower tier when it matters."""

__all__ = ["__version__"]

__version__ = "0.1.0"
