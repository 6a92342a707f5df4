"""Writes a table as JSON and as Markdown, the papers' numbers beside ours."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from examples.paper_tables.published import AREAS, COMPATIBILITY
from rmvdb.errors import NeedsConsent
from rmvdb.planning.prediction import finite

Row = dict[str, Any]
HEADS = {
    "backfill": (
        "method",
        "AUC_mAP",
        "AUC_CMC",
        "Gain",
        "± over seeds",
        "largest fall",
        "flips",
        "mAP t=0",
        "t=0.5",
        "t=1",
        "CMC@1 t=0",
        "published AUC_mAP, AUC_CMC",
        "published Gain",
    ),
    "compatible": (
        "method",
        "CMC self",
        "cross",
        "P_up",
        "P_com",
        "mAP self",
        "cross",
        "P_up",
        "P_com",
        "published, in the same order",
    ),
}
HEADS["updates"] = ("model", "CMC@1 trained alone", "self", "in the galleries of models 0, 1 …", "P_com there (–: undefined)")
#: The key of a row that tells the kind of its table.
SIGNS = {"backfill": "curve", "updates": "p_com", "compatible": "self_cmc"}
#: Networks that no paper has a name for.
NETWORKS = {"small": "a network of four convolutions", "small-wide": "a wider one"}
#: The frozen networks in front of heads.
FROZEN = {"lite0": "EfficientNet-Lite0 at 112 pixels", "lite2": "EfficientNet-Lite2 at 160 pixels"}


def check(path: Path, found: dict[str, Any]) -> None:
    """Raise NeedsConsent where a table is there of other networks or another device, or of full scale and this one is small."""
    if not path.is_file():
        return
    there = json.loads(path.read_text())
    lesser = there["scale"] == "full" and found["scale"] != "full"
    if lesser or any(there[name] != found[name] for name in ("backbones", "device")):
        raise NeedsConsent(
            f"{path} is of {_made_by(there)} and this table would be of {_made_by(found)}; "
            "name another --out, or take the file away"
        )


def write(found: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """`<setting>.json` and `<setting>.md` into the folder; raises NeedsConsent rather than take the place of another table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['setting']}.json"
    check(path, found)
    found = rounded(found)  # the page, too: it can be made again from the JSON
    path.write_text(json.dumps(finite(found), indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(found))
    return path, path.with_suffix(".md")


def markdown(found: dict[str, Any]) -> str:
    """The table with what it was made from."""
    kind = next(kind for kind, sign in SIGNS.items() if sign in found["rows"][0])
    cells = [line for row in found["rows"] for line in CELLS[kind](row, found["setting"])]
    about = found["about"][0].upper() + found["about"][1:]
    lines = [f"# {found['setting']}", "", f"{about}.", *_small(found), ""]
    lines += [_line(HEADS[kind]), _line(["---"] * len(HEADS[kind])), *map(_line, cells), "", *_notes(found, kind), ""]
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Numbers to five places: more are noise."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return round(value, 5) + 0.0 if isinstance(value, float) else value  # −0.0 + 0.0 is 0.0


def _small(found: dict[str, Any]) -> list[str]:
    """Return the first lines of a table of small scale, or of heads."""
    if found["scale"] == "heads":
        networks = " and, for the new models, of ".join(FROZEN.get(name, name) for name in found["backbones"])
        return [
            f"**Heads**: 128-d, on the features of {networks}, which others trained on ImageNet and which stay as they are. "
            "Only the heads learn the classes, so an old model and a new one differ less than networks that are trained whole."
        ]
    if found["scale"] != "small":
        return []
    networks = " and ".join(NETWORKS.get(name, name) for name in found["backbones"])
    where = "a CPU" if found["device"] == "CPU" else found["device"]
    return [f"**Small**: {networks} on {where}, by the same protocol; not to be set beside a table of full scale."]


def _made_by(found: dict[str, Any]) -> str:
    return f"scale {found['scale']}, by {', '.join(found['backbones'])} on {found['device']}"


def _areas(row: Row, setting: str) -> list[list[str]]:
    published = AREAS.get(setting, {}).get(row["method"])
    trained = row["seeds"] > 1
    curve = row["curve"]
    cells = [
        row["method"],
        _hundred(row["auc_map"]),
        _hundred(row["auc_cmc"]),
        f"{100 * row['gain']:z.0f} %",
        f"{100 * row['spread']['gain']:.1f}" if trained else "",
        _hundred(row["fall"]),
        _hundred(row["flips"]),
        *(_hundred(curve[at]) for at in (0, len(curve) // 2, -1)),
        _hundred(row["curve_cmc"][0]),
        f"{published[0]}, {published[1]}" if published else "",
        f"{published[2]} %" if published else "",
    ]
    return [cells]


def _compared(row: Row, setting: str) -> list[list[str]]:
    published = COMPATIBILITY.get(setting, {}).get(row["method"])
    names = [f"{what}_{of}" for of in ("cmc", "map") for what in ("self", "cross", "p_up", "p_com")]
    ours = (_spread(row, name) if name in row else "" for name in names)
    theirs = ("" if each is None else _share(each) for each in published or ())
    return [[row["method"], *ours, " ".join(theirs).strip()]]


def _updates(row: Row, setting: str) -> list[list[str]]:
    """A line for each model but the first; the gallery of an earlier model in each column."""
    own, alone = row["self_cmc"], row["alone_cmc"]
    return [
        [
            f"{row['method']} {step}",
            _share(alone[step]),
            _share(own[step]),
            " ".join(map(_share, cross)),
            " ".join(map(_share, gone)),
        ]
        for step, (cross, gone) in enumerate(zip(row["cross_cmc"], row["p_com"], strict=True), start=1)
    ]


def _notes(found: dict[str, Any], kind: str) -> list[str]:
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["pictures"].items())
    notes = [
        f"Scale: {found['scale']}; networks: {', '.join(found['backbones'])}; {found['epochs']} epochs; pictures: {sizes}.",
        f"Trained and measured in {found['seconds']:.0f} s on {_machine(found)}; each model was trained {_times(found)}.",
        *_pulls(found),
    ]
    if kind != "backfill":
        return [*notes, "Shares of 1."]
    told = all(row["method"] in AREAS.get(found["setting"], {}) for row in found["rows"])
    blank = "" if told else "; blank: in no table of the paper, in a figure at most"
    return [
        *notes,
        f"Percent. Trainings of ψ, ρ and h that a row is the mean of: {found['seeds']}; ± is the standard deviation of Gain.",
        "flips: right by the old model and wrong later, at the worst t.",
        f"Published: pictures of 224 x 224; Gains can be compared, absolute values cannot{blank}.",
    ]


def _machine(found: dict[str, Any]) -> str:
    """The device, and the threads, which older tables do not name."""
    threads = " and ".join(map(str, found.get("threads", ())))
    return f"{found['device']} by {threads} thread{'s' * (threads != '1')}" if threads else found["device"]


def _pulls(found: dict[str, Any]) -> list[str]:
    """The weights of the losses, where models were trained to be comparable."""
    pulls = "; ".join(f"{method} {own:g}, {pull:g}" for method, (own, pull) in found["weights"].items())
    taus = "; ".join(f"{method} {tau:g}" for method, tau in found.get("temperatures", {}).items())
    told = [f"Weights of classification and pull: {pulls}."] if pulls else []
    return [*told, f"Temperatures that were searched: {taus}."] if taus else told


def _times(found: dict[str, Any]) -> str:
    return f"once in each of {found['seeds']} seeds" if found["scale"] == "heads" else "once"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _hundred(share: float) -> str:
    return f"{100 * share:z.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:z.3f}"


def _spread(row: Row, name: str) -> str:
    """The value; of P_com with its standard deviation where it is the mean of several."""
    off = _share(row.get("spread", {}).get(name))
    several = row.get("seeds", 1) > 1 and name.startswith("p_com") and off != "–"
    return f"{_share(row[name])} ± {off}" if several else _share(row[name])


CELLS = {"backfill": _areas, "compatible": _compared, "updates": _updates}
