"""Saved models and tokenisers of transformers: loaded from directories alone, after their files have been checked."""
