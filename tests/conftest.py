"""What every test may ask for."""

import os

# Before anything loads OpenMP. Two test processes with a pool for every core each would mostly wait for one another, spinning:
# beside another load the trainings took eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.fixtures", "tests.support.postgres", "tests.support.data", "tests.support.no_skips"]
