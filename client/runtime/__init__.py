"""The decoder: configuration, weights, one step, and generation of text."""
