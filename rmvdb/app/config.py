"""Settings from rmvdb.toml and RMVDB_* environment variables; the environment wins.

    home                   folder for artifacts, archive and cache
    [milvus]   uri         a file ending in .db (Milvus Lite) or the http(s) address of a server
               token       user:password or API key
               timeout     seconds after which one call to the engine is given up
               staleness   seconds within which the engine shows every write; otherwise what the engine promises
    [registry] url         sqlite:///file or postgresql://user:password@host/database
    [index]    type, params, search    index of new collections, in Milvus' terms
    [indexes.<gallery>]    the same for one gallery, instead of [index]
    [search]   plan_max_age     seconds for which a client uses a serving plan without asking again
               longest_search   seconds after which a search of two collections is repeated rather than trusted
               consistency      Bounded, or Strong, which sees every write that returned before a search
    [backfill] batch            most records in one batch; those of a small gallery are smaller
               width            batches that one worker has in flight
               lease            seconds for which a worker holds a batch before it must renew
               longest_call     seconds that one call of a worker may take
               retry_for        seconds for which a worker tries again while the engine or the database does not answer
               missing          share of the records that may vanish without a reason before a cut-over waits for --accept-missing
    [items]    max_pixels       pixels of the largest picture that is decoded; a larger one is quarantined
    [models]   allow            modules, with what is in them, that models and sources may be of
    [throttle] rate             records a second that one worker stays below; otherwise as fast as it goes
               nice             share of its time, 0 to 1, in which one worker copies; otherwise all of it
               p99_ms           milliseconds; no batch begins while the p99 of a client's searches lies above
               flag             no batch begins while this file exists

The file is the one that `load` is given, or RMVDB_CONFIG names, or the nearest rmvdb.toml in the current folder and those
above it. What other users may change is refused, unless RMVDB_TRUST names its folder. Relative paths start at that file's
folder. `[milvus] uri` is RMVDB_MILVUS__URI in the environment.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from rmvdb.errors import ConfigError, RmvdbError
from rmvdb.items.objects import line
from rmvdb.storage import files, ownership
from rmvdb.text import database_url, without_password
from rmvdb.timing import WRITE_LASTS

if TYPE_CHECKING:
    from rmvdb import types

NAME = "rmvdb.toml"
_ENV = "RMVDB_"
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
#: The keys of one setting from the outermost section on.
_Keys: TypeAlias = tuple[str, ...]


class DatabaseUrl(SecretStr):
    """A database's URL; shown without its password."""

    def __str__(self) -> str:
        return without_password(self.get_secret_value())

    def __repr__(self) -> str:
        return f"DatabaseUrl({str(self)!r})"


def _names_a_host(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object) -> object:
        # Otherwise `batch = true` would be a batch of one record.
        if isinstance(value, bool):
            raise ValueError("must be a number or a text, not true or false")
        return value


class MilvusSection(_Section):
    """Where the vectors are."""

    uri: str = Field(
        default="", description="a file ending in .db (Milvus Lite) or the http(s) address of a server; milvus.db in home"
    )
    token: SecretStr = Field(default=SecretStr(""), description="user:password or API key of a server", examples=["root:Milvus"])
    timeout: Seconds = Field(default=10.0, description="seconds after which one call to the engine is given up")
    staleness: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="seconds within which the engine shows every write; otherwise what the engine promises",
        examples=[5.0],
    )

    @field_validator("timeout")
    @classmethod
    def _a_write_outlasts_its_calls(cls, timeout: float) -> float:
        # A client begins no call of a write that could end after the write's deadline.
        if timeout > WRITE_LASTS / 2:
            raise ValueError(f"must be {WRITE_LASTS / 2:g} or less: a write of several calls must end within {WRITE_LASTS:g} s")
        return timeout

    @field_validator("uri")
    @classmethod
    def _file_or_address(cls, uri: str) -> str:
        scheme, separator, rest = uri.partition("://")
        if not separator:
            if uri and not uri.endswith(".db") and not uri.startswith("unix:"):
                raise ValueError("must be a file ending in .db or an address such as http://localhost:19530")
        elif scheme not in ("http", "https", "tcp", "unix"):
            raise ValueError("must be a file ending in .db or an address such as http://localhost:19530")
        elif "@" in rest:
            raise ValueError("must not carry a password; write it to milvus.token as user:password")
        elif scheme != "unix" and not _names_a_host(uri):
            raise ValueError("must name a host, and a port up to 65535, such as http://localhost:19530")
        return uri


class RegistrySection(_Section):
    """Where upgrades, batches and intents are remembered."""

    url: DatabaseUrl = Field(
        default=DatabaseUrl(""),
        description="sqlite:///file or postgresql://user:password@host/database; registry.sqlite in home",
        examples=["postgresql://user:password@localhost/rmvdb"],
    )

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: DatabaseUrl) -> DatabaseUrl:
        normal = database_url(url.get_secret_value())
        if normal and not normal.startswith(("sqlite:///", "postgresql+psycopg://")):
            raise ValueError("must begin with sqlite:/// or postgresql://")
        return DatabaseUrl(normal)


class IndexSection(_Section):
    """An index of a new collection; whether the engine takes it is checked before the collection is made."""

    type: Annotated[str, Field(min_length=1)] = Field(
        default="AUTOINDEX", description="index type: FLAT, IVF_FLAT, HNSW, GPU_CAGRA …"
    )
    params: dict[str, Any] = Field(default={}, description="how it is built", examples=[{"M": 16, "efConstruction": 200}])
    search: dict[str, Any] = Field(default={}, description="how it is searched", examples=[{"ef": 128}])

    def value(self) -> types.Index:
        """The index as the rest of rmvdb knows it."""
        from rmvdb import types  # here, so that reading settings does not wait for numpy

        return types.Index(type=self.type, params=self.params, search=self.search)


class SearchSection(_Section):
    """How long a client may answer by what it knows."""

    plan_max_age: Seconds = Field(default=5.0, description="seconds for which a client uses a serving plan without asking again")
    longest_search: Seconds = Field(
        default=5.0, description="seconds after which a search of two collections is repeated rather than trusted"
    )
    consistency: Literal["Bounded", "Strong"] = Field(
        default="Bounded", description="of searches that don't name theirs: Strong sees every write that returned before"
    )


class BackfillSection(_Section):
    """How the gallery is moved."""

    batch: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1000, description="most records in one batch")
    width: Annotated[int, Field(ge=1, le=64)] = Field(default=3, description="batches that one worker has in flight")
    lease: Seconds = Field(default=40.0, description="seconds for which a worker holds a batch before it must renew")
    longest_call: Seconds = Field(default=10.0, description="seconds that one call of a worker may take")
    retry_for: Annotated[float, Field(ge=0)] = Field(
        default=60.0, description="seconds for which a worker tries again while the engine or the database does not answer"
    )
    missing: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.01, description="share of the records, 0 to 1, that may be gone from the old collection without a reason"
    )

    @model_validator(mode="after")
    def _lease_outlasts_a_call(self) -> BackfillSection:
        # A worker uses a claim only while its lease has more left than two of the longest calls, and renews it six times a lease.
        if self.lease < 3 * self.longest_call:
            raise ValueError(f"lease ({self.lease:g} s) must be at least three times longest_call ({self.longest_call:g} s)")
        return self


class ItemsSection(_Section):
    """What records are made from."""

    # Pillow itself refuses more than twice its own limit, whatever stands here.
    max_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = Field(
        default=50_000_000, description="pixels of the largest picture that is decoded; a larger one is quarantined"
    )


class ModelsSection(_Section):
    """Whose code runs here: a registry may name no other module."""

    allow: tuple[str, ...] = Field(
        default=(),
        description="modules, with what is in them, that models and sources may be of; written by model add and gallery add",
        examples=[["models"]],
    )


class ThrottleSection(_Section):
    """How gently the gallery is moved; what `rmvdb throttle` sets for an upgrade counts instead."""

    rate: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="records a second that one worker stays below; otherwise as fast as it goes", examples=[500.0]
    )
    nice: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="share of its time, 0 to 1, in which one worker copies; otherwise all of it", examples=[0.5]
    )
    p99_ms: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="milliseconds; no batch begins while the p99 of a client's searches lies above",
        examples=[100.0],
    )
    flag: Path | None = Field(default=None, description="no batch begins while this file exists", examples=["backfill.hold"])

    @field_validator("flag")
    @classmethod
    def _a_name(cls, flag: Path | None) -> Path | None:
        if flag == Path():  # what an empty text is taken for: the folder of rmvdb.toml, which always exists
            raise ValueError("must name a file")
        return flag


class ProjectSettings(BaseSettings):
    """All settings, as `load` gives them: paths are absolute and empty addresses are filled in."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    home: Path = Field(default=Path(".rmvdb"), description="folder for artifacts, archive and cache")
    milvus: MilvusSection = MilvusSection()
    registry: RegistrySection = RegistrySection()
    index: IndexSection = IndexSection()
    indexes: dict[str, IndexSection] = Field(default={}, description="an index for one gallery, instead of [index]")
    search: SearchSection = SearchSection()
    backfill: BackfillSection = BackfillSection()
    items: ItemsSection = ItemsSection()
    models: ModelsSection = ModelsSection()
    throttle: ThrottleSection = ThrottleSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, whose content is given to the constructor."""
        return env_settings, init_settings

    @model_validator(mode="after")
    def _call_outlasts_the_engine(self) -> ProjectSettings:
        if self.milvus.timeout > self.backfill.longest_call:
            raise ValueError(
                f"milvus.timeout ({self.milvus.timeout:g} s) must not be longer than "
                f"backfill.longest_call ({self.backfill.longest_call:g} s)"
            )
        return self

    @property
    def artifacts(self) -> Path:
        """The folder of transforms and calibrations."""
        return self.home / "artifacts"

    @property
    def registry_file(self) -> Path | None:
        """The file of a registry of SQLite."""
        url = self.registry.url.get_secret_value()
        return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:////") else None

    @property
    def manifest(self) -> Path:
        """The file that brings back a lost registry."""
        return self.home / "manifest.json"

    @property
    def archive(self) -> Path:
        """The folder of old vectors."""
        return self.home / "archive"

    @property
    def cache(self) -> Path:
        """The folder of embeddings that are kept from the plan's sample."""
        return self.home / "cache"

    def index_for(self, gallery: str) -> types.Index:
        """The index of that gallery's new collections."""
        return self.indexes.get(gallery, self.index).value()


def load(path: Path | None = None, *, trust: bool = False) -> ProjectSettings:
    """Read the settings; raises ConfigError with one sentence that names the file or variable, the key and the way out.

    Without `trust`, or RMVDB_TRUST, what other users may change is refused: the file, home and a registry of SQLite.
    """
    file = find(path)
    base = file.parent if file else Path.cwd()
    trust = trust or ownership.is_trusted(base)
    if file and not trust:
        ownership.refuse_foreign(file)
    data = _read(file) if file else {}
    _refuse_unknown(data, file)
    try:
        settings = ProjectSettings(**data)
    except ValidationError as exc:
        raise ConfigError(_sentence(exc, file)) from exc
    except SettingsError as exc:
        raise ConfigError(f"Environment: {exc}; write JSON, or one variable for each key as in RMVDB_MILVUS__URI") from exc
    settings = _resolved(settings, base)
    if not trust:
        for each in filter(None, (settings.home, settings.registry_file)):
            ownership.refuse_foreign(each)
    return settings


def template(*, uri: str | None = None) -> str:
    """A commented rmvdb.toml in which every setting stands with its default, and `uri` as the Milvus to use, if it is given."""
    lines = [
        "# Settings of rmvdb. Take the # away to change one; relative paths start at this file's folder.",
        "# The environment wins over this file: RMVDB_MILVUS__URI is uri in [milvus].",
        "",
        *_template_lines(ProjectSettings),
    ]
    for name, field in ProjectSettings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            lines += ["", f"# {section.__doc__}", f"[{name}]", *_template_lines(section)]
    lines += ["", f"# {ProjectSettings.model_fields['indexes'].description}", "# [indexes.photos]", '# type = "HNSW"']
    if uri is not None:
        at = next(number for number, each in enumerate(lines) if each.startswith("# uri = "))
        lines[at] = f"uri = {_toml(uri)}"
    return "\n".join([*lines, "# params = { M = 16, efConstruction = 200 }", "# search = { ef = 128 }", ""])


def allow(file: Path, modules: Sequence[str]) -> None:
    """Write these modules into `[models] allow` of the file, and leave all else in it as it is.

    Raises ConfigError, with the line to write by hand, where that cannot be done.
    """
    data, text = _read(file), file.read_text(encoding="utf-8")
    wanted = data | {"models": data.get("models", {}) | {"allow": list(modules)}}
    section = re.search(r"(?m)^[ \t]*\[[ \t]*models[ \t]*\][^\n]*(?:\n|\Z)", text)
    if section is None:
        changed = f"{text.rstrip()}\n\n[models]\n{line(modules)}\n".lstrip()
    else:
        head, rest = text[: section.end()], text[section.end() :]
        there = re.match(r"(?s)((?:(?!\n[ \t]*\[).)*?(?:^|\n))[ \t]*allow[ \t]*=[ \t]*\[[^\]]*\]", f"\n{rest}")
        body = f"{there[1][1:]}{line(modules)}{rest[there.end() - 1 :]}" if there else f"{line(modules)}\n{rest}"
        changed = (head if head.endswith("\n") else f"{head}\n") + body
    try:
        if tomllib.loads(changed) != wanted:
            raise ValueError("it is written in another way")
        # In place of the file that a link leads to, with its rights.
        files.durable_write(file.resolve(), changed.encode(), mode=stat.S_IMODE(file.stat().st_mode))
    except (ValueError, RmvdbError) as exc:
        raise ConfigError(f"{file} could not be changed ({exc}); write {line(modules)} there, below [models]") from exc


def _template_lines(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if field.description and name != "indexes":
            shown = field.examples[0] if field.examples else field.default
            yield f"# {field.description}"
            yield f"# {name} = {_toml(_DEFAULT_ADDRESS.get(name, shown))}"


#: Defaults that depend on home.
_DEFAULT_ADDRESS = {"uri": ".rmvdb/milvus.db"}


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + " }"
    return json.dumps(value if isinstance(value, int | float | str | list) else str(value))


def find(path: Path | None) -> Path | None:
    """The file that is named, or the nearest one upwards; none if there is none."""
    asked = path or (Path(os.environ["RMVDB_CONFIG"]) if os.environ.get("RMVDB_CONFIG") else None)
    if asked is None:
        here = Path.cwd()
        return next((folder / NAME for folder in (here, *here.parents) if (folder / NAME).is_file()), None)
    asked = asked.expanduser().absolute()
    file = asked / NAME if asked.is_dir() else asked
    if not file.is_file():
        whose = "" if path else " (named by RMVDB_CONFIG)"
        raise ConfigError(f"{file}{whose} is not there; run `rmvdb init` in its folder or name another file")
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(
            f"{file} is not valid TOML: {exc}; mend that line, `rmvdb init` in an empty folder shows the form"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file} is not UTF-8 text; save it as UTF-8") from exc
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read ({exc.strerror}); check its permissions") from exc


def _refuse_unknown(data: Mapping[str, Any], file: Path | None) -> None:
    for keys in _paths(data):
        if _known_part(keys) not in _known():
            raise ConfigError(f"{file}: there is no setting {'.'.join(keys)!r}; {_way_out(keys, environment=False)}")
    for variable in os.environ:
        keys = _env_keys(variable)
        if keys and _generic(keys) not in _known():
            raise ConfigError(f"Environment: there is no setting {variable}; {_way_out(keys, environment=True)}")


def _paths(data: Mapping[str, Any], prefix: _Keys = ()) -> Iterator[_Keys]:
    """The keys of every value and every section, outermost first."""
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*prefix, key))


def _env_keys(variable: str) -> _Keys:
    """The keys that an environment variable sets; none for one that is not ours."""
    if not variable.upper().startswith(_ENV) or variable.upper() in ("RMVDB_CONFIG", ownership.VARIABLE):
        return ()
    return tuple(variable[len(_ENV) :].lower().split("__"))


def _known() -> Iterator[_Keys]:
    """The keys of every section and setting, with * for a gallery."""
    for name, field in ProjectSettings.model_fields.items():
        yield (name,)
        if name == "indexes":
            yield (name, "*")
            yield from ((name, "*", key) for key in IndexSection.model_fields)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            yield from ((name, key) for key in field.annotation.model_fields)


def _generic(keys: _Keys) -> _Keys:
    return (keys[0], "*", *keys[2:]) if keys[0] == "indexes" and len(keys) > 1 else keys


def _known_part(keys: _Keys) -> _Keys:
    """The keys without those below params and search, which are Milvus' own."""
    depth = {"index": 2, "indexes": 3}.get(keys[0], len(keys))
    return _generic(keys[:depth] if keys[depth - 1 : depth] in (("params",), ("search",)) else keys)


def _way_out(keys: _Keys, *, environment: bool) -> str:
    if _known_part(keys) in _known():
        # The environment has no lower case, and Milvus' own names do.
        return f"write {_shown(keys[:-1], environment=True)} as JSON, such as '{{\"M\": 16}}'"
    gallery = keys[1] if keys[0] == "indexes" and len(keys) > 1 else "<gallery>"
    known = [tuple(gallery if key == "*" else key for key in each) for each in _known()]
    near = _nearest(keys, known)
    if near:
        return f"did you mean {_shown(near, environment=environment)}?"
    beside = [each for each in known if each[:-1] == keys[:-1]]
    return f"there are: {', '.join(_shown(each, environment=environment) for each in beside)}{_HINTS.get(keys[0], '')}"


#: What is looked for in the wrong section.
_MILVUS_OWN = "; what Milvus' index takes, such as ef or nlist, goes into index.params or index.search"
_HINTS = {
    "index": f"{_MILVUS_OWN}, an index for one gallery into [indexes.<gallery>]",
    "indexes": _MILVUS_OWN,
    "search": _MILVUS_OWN,
}


def _nearest(keys: _Keys, known: list[_Keys]) -> _Keys | None:
    """The setting that is all but the same; else the one of the same section most like it, or one of such a name elsewhere."""
    beside = [each for each in known if each[:-1] == keys[:-1]]
    return (
        _like(keys, known, of=slice(None), cutoff=0.9)
        or _like(keys[-1:], beside, of=slice(-1, None), cutoff=0.65)
        or _like(keys[-1:], known, of=slice(-1, None), cutoff=0.8)
    )


def _like(keys: _Keys, known: list[_Keys], *, of: slice, cutoff: float) -> _Keys | None:
    """The first of the known keys whose part `of` is most like these."""
    parts = {".".join(each[of]): each for each in reversed(known)}
    near = difflib.get_close_matches(".".join(keys), parts, n=1, cutoff=cutoff)
    return parts[near[0]] if near else None


def _shown(keys: _Keys, *, environment: bool) -> str:
    return _ENV + "__".join(keys).upper() if environment else repr(".".join(keys))


def _sentence(exc: ValidationError, file: Path | None) -> str:
    """The first of pydantic's errors as one sentence; the others show once that is mended."""
    error = exc.errors(include_url=False)[0]
    keys = tuple(str(part) for part in error["loc"])
    problem = re.sub(r"^(Input|String) should", "must", error["msg"].removeprefix("Value error, "))
    problem = problem.replace("dictionary", "table")
    problem = problem.replace("Input is not a valid path for <class 'pathlib.Path'>", "must be a path").split(", unable")[0]
    where, dotted = _origin(keys, file), ".".join(keys)
    if error["type"] == "model_type":
        return f"{where}: {dotted} must be a section; write [{dotted}] and its keys below"
    field = _field(keys)
    if field is None or not field.description:
        return f"{where}: {dotted + ': ' if dotted else ''}{problem}; change one of them"
    what = "" if error["type"] == "value_error" else f"{_example(field)}: {field.description}"
    return f"{where}: {dotted}{_value(keys, error['input'])} {problem}{what}"


def _origin(keys: _Keys, file: Path | None) -> str:
    """The environment variable that set these keys, else the file."""
    for variable in os.environ:
        found = _env_keys(variable)
        if found and keys[: len(found)] == found:
            return variable
    return str(file) if file else "Settings"


def _field(keys: _Keys) -> FieldInfo | None:
    if keys[:1] == ("indexes",):
        return IndexSection.model_fields.get(keys[2]) if len(keys) > 2 else ProjectSettings.model_fields["indexes"]
    section: Any = ProjectSettings
    for key in keys[:-1]:
        section = section.model_fields[key].annotation
        if not isinstance(section, type) or not issubclass(section, _Section):
            return None
    return section.model_fields.get(keys[-1]) if keys else None


def _value(keys: _Keys, value: object) -> str:
    """The wrong value as it may be shown."""
    if keys[-1] == "token" or isinstance(value, SecretStr) or (keys[-1] == "uri" and "@" in str(value)):
        return ""
    return f" = {without_password(value)!r}" if isinstance(value, str) else f" = {value!r}"


def _example(field: FieldInfo) -> str:
    shown = field.examples[0] if field.examples else field.default
    return f", such as {_toml(shown)}" if shown else ""


def _resolved(settings: ProjectSettings, base: Path) -> ProjectSettings:
    """The same with absolute paths and no empty address."""
    home = _absolute(settings.home, base)
    uri, url = settings.milvus.uri, settings.registry.url.get_secret_value()
    if not uri:
        uri = str(home / "milvus.db")
    elif "://" not in uri and not uri.startswith("unix:"):
        uri = str(_absolute(Path(uri), base))
    if not url:
        url = f"sqlite:///{home / 'registry.sqlite'}"
    elif url.startswith("sqlite:///") and url != "sqlite:///:memory:":
        url = f"sqlite:///{_absolute(Path(url.removeprefix('sqlite:///')), base)}"
    flag = settings.throttle.flag
    changes = {
        "home": home,
        "throttle": settings.throttle.model_copy(update={"flag": flag and _absolute(flag, base)}),
        "milvus": settings.milvus.model_copy(update={"uri": uri}),
        "registry": settings.registry.model_copy(update={"url": DatabaseUrl(url)}),
    }
    return settings.model_copy(update=changes)


def _absolute(path: Path, base: Path) -> Path:
    return Path(os.path.normpath(base.absolute() / path.expanduser()))
