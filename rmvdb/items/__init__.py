"""Embedders, sources and the Python objects that specs name: your own code, loaded and checked."""
