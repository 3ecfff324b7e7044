"""Measurements and figures: one file an experiment, each a function that the command line calls."""
