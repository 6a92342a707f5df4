"""`make bench`: what rmvdb adds to the parts that it is made of. Each row compares two sides that ran in turns, in one run."""
