"""Saved models and tokenisers of transformers, loaded from local directories after their files have been checked."""
