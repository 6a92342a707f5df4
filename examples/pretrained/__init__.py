"""Models that others trained, for benches and examples: their files, the vectors that they gave, networks for pictures."""
