"""A terminal for the examples beside it: an empty folder, and rmvdb's commands as you would type them there."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


@contextlib.contextmanager
def empty_folder():
    """Work in an empty folder, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def run(command, show=1):
    """Run a command to its end, and show the last lines that it prints."""
    print(f"$ {command}", flush=True)
    # rmvdb finds your models in the current folder or among the installed packages. These lie beside this file.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    words = [sys.executable, "-m", *shlex.split(command)]
    printed = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in printed.splitlines()[-show:]:
        print(f"  {line.strip()}", flush=True)
