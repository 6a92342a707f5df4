"""The promises under load and faults: `make stress`, or `python -m tests.stress --help`."""
