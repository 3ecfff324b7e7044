"""Modules: attention, the layers of a stack, and what decoding keeps of them."""
