"""Prepared data, made once for each worker."""

from prepared_data import data, labelled, pairs, text, text_file

__all__ = ["data", "labelled", "pairs", "text", "text_file"]
