"""What users bring: embedders, sources of items, and the Python objects that specs name."""
