"""rmvdb beside other programs that change the model of a gallery: `python -m tests.bench.others`."""
