"""The command line: one command per step. A command parses, calls one function and prints. Each file holds one subject."""
