"""Measurements and figures: one file for each experiment, with a function that the command line calls."""
