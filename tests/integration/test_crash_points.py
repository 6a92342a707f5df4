"""Every call by which a process changes something is in a story, in which a process dies at it (`crash_points`).

The calls stand in the code: Backfill.CALLS, MovedFirst.CALLS, Client.CALLS, Conductor.CALLS.
"""

from __future__ import annotations

import ast
from pathlib import Path

import rmvdb
from rmvdb.backfill.asked_for import MovedFirst
from rmvdb.backfill.batches import Backfill
from rmvdb.serving.client import Client
from rmvdb.upgrade.run import Conductor
from tests.support.mortal import READS
from tests.support.stories import EVERYWHERE

#: Calls that change something and are in no story, and why.
NOT_IN_A_STORY = {
    "registry.hand_back": "a claim that was lost; without it the claim runs out",
    "registry.extend_intents": "a write that waits for long; without it nobody waits for that write, which ends in an error",
    "registry.ask_for": "records that searches asked for; without it they move in their turn",
    "registry.keep_queries": "a sample of what was asked; without it a plan has fewer queries",
    "registry.release": "a quarantined record that somebody deleted; done again at the next look",
    "registry.add_artifact": "what was trained, before an upgrade that names it is registered; the same again changes nothing",
    "registry.add_contents": "the contents of that, before it as well; written in parts, and those that are there are left",
    "registry.add_version": "as that",
    "registry.allow_removal": "--execute, before the upgrade is registered",
    "registry.put_back": "rmvdb verify --repair; the same again finds nothing that is lost",
    "registry.add_written": "rmvdb verify --repair; the same again finds nothing that is unknown",
    "registry.note_trouble": "a registry that has gone back, after which nothing is done",
}


#: Files that no upgrade and no application calls: commands of their own.
APART = {"garbage", "rebuild", "status"}


def test_no_call_that_stands_in_the_code_is_forgotten() -> None:
    package, made = Path(rmvdb.__file__).parent, set()
    rooms = [file for room in ("backfill", "serving", "upgrade") for file in (package / room).glob("*.py")]
    for file in (*(file for file in rooms if file.stem not in APART), package / "registry" / "mark.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                # A batch's column `archive` names its files.
                if owner.strip("_") in ("registry", "store", "archive") and node.attr not in (*READS, "values"):
                    made.add(f"{owner.strip('_')}.{node.attr}")
    lists = (Backfill.CALLS, MovedFirst.CALLS, *Client.CALLS.values(), *Conductor.CALLS.values(), tuple(EVERYWHERE))
    listed = {call.split()[0] for calls in lists for call in calls}
    assert made - listed == NOT_IN_A_STORY.keys()
    assert listed - made == set()
