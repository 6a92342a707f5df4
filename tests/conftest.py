"""What every test may ask for."""

pytest_plugins = ["tests.support.fixtures", "tests.support.postgres", "tests.support.data", "tests.support.no_skips"]
