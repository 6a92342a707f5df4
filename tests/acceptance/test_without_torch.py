"""Where torch is not installed all works but training: transforms are arrays, and only a user's own embedder may need torch."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.acceptance.conftest import TRAINED
from tests.support.project import Project

#: Commands and an application in one process, in which an import of torch fails.
SCRIPT = """
import json, sys
sys.modules["torch"] = None
import rmvdb, models
from rmvdb.cli import main as cli

def run(*words):
    try:
        cli.main(words, prog_name="rmvdb")
    except SystemExit as exc:
        assert not exc.code, words

upgrade = json.loads(sys.argv[1])
for words in (["doctor"], ["status"], ["gallery", "show"], [*upgrade, "--until", "0.5", "--no-cutover"], ["status"]):
    run(*words)
with rmvdb.connect() as client:
    assert [len(leg.transforms) for leg in client.plan.legs] == [1, 2]  # ρ, and ψ after it
    found = [client.search(models.item(id), limit=3, rescore=50)[0].id for id in range(20)]
    assert sum(id == number for number, id in enumerate(found)) >= 15, found  # ψ may miss some in the old part
    assert len(client.search([models.item(8), models.item(9)])) == 2
    client.upsert({"id": 900, "item": models.item(900), "label": models.label(900)})
    assert client.search(models.item(900), limit=1)[0].id == client.get(900)[0].id == 900
    client.delete(900)
for words in (upgrade, ["verify"], ["history"]):
    run(*words)
"""


def test_commands_and_applications_need_no_torch_once_the_plan_is_made(planned: Project) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([*TRAINED, "--accept-risk"])],
        cwd=planned.folder,
        env=planned.environment | {"RMVDB_SEARCH__RESCORE_MS": "60000"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
