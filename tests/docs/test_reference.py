"""The reference is complete, its pages are named, and no link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import rmvdb
from docs import generate
from rmvdb.app import settings
from rmvdb.cli import main as cli
from rmvdb.planning.orders.table import ORDERS
from tests.docs.blocks import PAGES, README, WRITTEN

COMMANDS = dict(generate.leaves(cli.main))
SECTIONS = {
    name: {"indexes": settings.IndexSection}.get(name, field.annotation)
    for name, field in settings.ProjectSettings.model_fields.items()
    if field.annotation is not Path
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_every_command_and_option_is_in_the_reference(typed: str) -> None:
    page = PAGES["reference/commands.md"]
    assert f"\n## {typed}\n" in page
    part = page.split(f"\n## {typed}\n")[1].split("\n## ")[0]
    for option in COMMANDS[typed].params:
        if isinstance(option, click.Option):
            assert all(re.search(rf"^\| .*`{re.escape(name)}[ `]", part, re.MULTILINE) for name in option.opts)
            assert generate._cell(option.help or "nothing") in part


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_in_the_reference_and_explained(section: str) -> None:
    path = f"{section}.<gallery>" if section == "indexes" else section
    for name, field in SECTIONS[section].model_fields.items():
        row = re.search(rf"^\| `{re.escape(path)}\.{name}` \| `RMVDB_\w+` \| .+$", PAGES["reference/settings.md"], re.MULTILINE)
        assert row, name
        assert field.description
        assert field.description in row[0]
    assert {"| `home` |", "| `local` |"} <= set(re.findall(r"^\| `\w+` \|", PAGES["reference/settings.md"], re.MULTILINE))


@pytest.mark.parametrize("error", generate.error_classes(), ids=lambda error: error.__name__)
def test_every_error_says_its_remedy(error: type[rmvdb.RmvdbError]) -> None:
    remedy = generate.remedy(error)
    assert re.fullmatch(r"[A-Z].{15,}\.", remedy)
    part = PAGES["reference/errors.md"].split(f"\n## {error.__name__}\n")[1].split("\n## ")[0]
    assert f"**Remedy:** {remedy}" in part


def test_every_public_name_is_in_the_reference() -> None:
    for module, names in generate.public().items():
        assert all(f"\n::: {module}.{name}\n" in PAGES["reference/python.md"] for name in names)
    assert set(rmvdb.__all__) - {"errors"} == set(generate.public()["rmvdb"])


def test_every_page_is_named_and_every_named_page_is_there() -> None:
    assert generate.orphans() == set()


def test_readme_is_short_and_without_greek() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 250
    assert not re.search(r"[α-ωΑ-Ω]", text)


@pytest.mark.parametrize("page", WRITTEN)
def test_no_link_leads_nowhere(page: str) -> None:
    here = README if page == "README.md" else generate.DOCS / page
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (here.parent / file).resolve() if file else here
        known = generate.DOCS in path.parents and str(path.relative_to(generate.DOCS))
        assert path.exists() or known in PAGES, target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", PAGES[known or "README.md"], re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}, target


def test_figures_of_readme_stand_on_their_pages() -> None:
    table = README.read_text().split("\n## Measured\n")[1].split("\n## ")[0]
    told = PAGES["measured.md"] + PAGES["research/paper-tables.md"]
    for _, measured, command in re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", table, re.MULTILINE):
        assert command in told
        assert all(figure in told for figure in re.findall(r"\d[\d,.]*\d|\d", measured)), measured


def test_the_page_on_choosing_has_the_orders_of_the_table() -> None:
    part = PAGES["choosing.md"].split("\n## Orders\n")[1].split("\n## ")[0]
    head, *rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", part, re.MULTILINE)
    assert head[0] == "--order"
    assert rows == [(order.name, order.confidence, order.needs) for order in ORDERS.values()]
