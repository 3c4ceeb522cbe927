"""Offline preparation: read a model, quantize it, and write resident weights beside refinement bits."""
