"""The decode step on a GPU: one captured graph a token, look-ups and refinement included, no host work inside."""
