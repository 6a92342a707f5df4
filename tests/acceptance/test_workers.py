"""Workers in processes of their own: they take over an upgrade, and obey pauses, limits and windows."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

import rmvdb.app
from rmvdb.app.daemon import Scheduler
from rmvdb.app.window import Window
from rmvdb.types import Index
from rmvdb.upgrade import leadership
from tests.acceptance.conftest import IDS, NAIVE
from tests.support.application import searching
from tests.support.project import Project
from tests.support.waiting import wait_for_processes


def test_a_worker_takes_over_what_detach_left(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    status = project.json("status")
    assert (status["phase"], status["t"], status["doing"]) == (
        "serving both",
        0.0,
        "both collections are searched; the work list is not made yet",
    )
    assert "waiting for a worker" in status["held_back"]
    worker = project.start("worker")
    try:
        wait_for_processes(lambda: project.json("status")["phase"] == "cut over")
    finally:
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=120)
    assert worker.returncode == 0, out + err


@pytest.mark.parametrize("leads", [True, False])
def test_a_worker_that_knew_another_collection_of_that_name_leaves_no_field_behind(project: Project, leads: bool) -> None:
    held = project.json("gallery", "show", "things")["collections"][0]["name"]
    app, other = rmvdb.app.load(project.folder), rmvdb.app.load(project.folder)
    schema = replace(other.store.describe(held), collection="mine")
    other.store.create(replace(schema, dynamic=False), Index(type="FLAT"))
    assert app.store.count("mine") == 0  # the worker's, months ago
    other.store.drop("mine")
    other.store.create(schema, Index(type="FLAT"))
    for page in other.store.scan(held, fields=None, vector=True):
        other.store.upsert("mine", [replace(record, fields={**record.fields, "price": record.id}) for record in page])
    project.ask("gallery", "add", "mine", "--model", "v1", "--collection", "mine", "--source", "call:models:items")
    part = ("--until", "0.1", "--no-cutover")
    project.ask(*NAIVE, "-g", "mine", "--execute", *(("--detach",) if leads else part))
    row = other.registry.active_upgrade(other.registry.gallery("mine").id)
    assert row is not None
    other.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0))

    scheduler, stop = Scheduler(app, galleries=["mine"], window=Window(None), say=lambda _: None), threading.Event()
    worker = threading.Thread(target=scheduler.run, args=(stop,))
    with nullcontext() if leads else leadership.hold_leadership(other.conductor("mine"), row, other.worker()):
        worker.start()
        try:
            wait_for_processes(lambda: project.json("status", "-g", "mine")["t"] == 1.0)
        finally:
            stop.set()
            worker.join(30.0)

    moved = [record for page in other.store.scan(row.new_collection, fields=["price"]) for record in page]
    assert [record.fields for record in moved] == [{"price": id} for id in IDS]
    for each in (app, other):
        each.close()


def test_pause_throttle_and_windows_are_obeyed_and_said(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    project.ask("pause")
    worker = project.start("worker")
    try:
        wait_for_processes(lambda: project.json("status")["workers"])
        time.sleep(2)
        status = project.json("status")
        assert status["done"] == 0
        assert "paused" in status["held_back"]
        project.ask("throttle", "--rate", "25")
        began = time.monotonic()
        project.ask("resume")
        wait_for_processes(lambda: project.json("status")["held_back"] == "throttled to 25 records/s")
        wait_for_processes(lambda: project.json("status")["done"] == 400)
        assert time.monotonic() - began > 10
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)


def test_a_share_of_time_a_flag_file_and_slow_searches_hold_it_back_and_are_said(project: Project) -> None:
    with (project.folder / "rmvdb.toml").open("a") as settings:
        settings.write('[throttle]\nflag = "hold"\n')
    flag = project.folder / "hold"
    project.ask(*NAIVE, "--detach")
    assert project.ask("throttle", "--nice", "0.001").stdout.endswith(": nice 0.001\n")
    worker = project.start("worker")
    try:
        wait_for_processes(lambda: project.json("status")["held_back"] == "nice 0.001: copies at most 0.1 % of the time")
        wait_for_processes(lambda: project.json("status")["done"] > 0)
        flag.touch()
        project.ask("throttle", "--nice", "0")
        wait_for_processes(lambda: project.json("status")["held_back"] == f"flag file {flag} exists")
        with searching(project, IDS) as watch:  # to the end: what a client did 30 s ago does not count
            wait_for_processes(lambda: watch.searches > 30)
            project.ask("throttle", "--p99-ms", "0.01")
            wait_for_processes(lambda: "p99 of client " in project.json("status")["held_back"])
            assert "ms above the ceiling of 0.01 ms" in project.ask("status").stdout
            begun = project.json("status")["done"]
            assert begun <= 3 * 50  # what one burst of a worker may begin
            flag.unlink()
            time.sleep(2)
            assert project.json("status")["done"] == begun
            project.ask("throttle", "--p99-ms", "0")
            wait_for_processes(lambda: project.json("status")["phase"] == "cut over")
        assert watch.trouble == []
        assert project.json("status")["held_back"] == ""
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)


def test_a_worker_outside_its_window_waits_and_says_so(project: Project) -> None:
    project.ask(*NAIVE, "--detach")
    closed = (time.localtime().tm_hour + 12) % 24
    worker = project.start("worker", "--window", f"0 {closed} * * *")
    try:
        wait_for_processes(lambda: "outside its window" in project.json("status")["held_back"])
        assert project.json("status")["done"] == 0
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=120)
