"""Files: the archive of what was moved, kept embeddings, artifacts by their SHA-256, and whose folders they are in."""
