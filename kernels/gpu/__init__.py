"""Triton kernels that work on an attachment: select and look up, refine from slots in place, begin and end steps."""
