"""Files that are checked when they are read, and complete when they are written."""
