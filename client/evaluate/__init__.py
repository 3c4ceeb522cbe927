"""How good a model is: perplexity and divergence from the unquantized one."""
