"""Numerics: each operation has a torch reference and fast versions with the same signature."""
