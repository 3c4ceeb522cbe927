"""The demo: a small real model gets its accuracy back from refinement bits that a daemon serves."""
