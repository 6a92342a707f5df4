"""The settings: names, types, bounds, defaults and meanings. They are values; `config.load` reads and checks them."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rmvdb.text import database_url, without_password
from rmvdb.timing import WRITE_LASTS

if TYPE_CHECKING:
    from rmvdb import types

#: The prefix of the environment variables.
PREFIX = "RMVDB_"
Seconds: TypeAlias = Annotated[float, Field(gt=0)]


class DatabaseUrl(SecretStr):
    """A database's URL. It shows itself without its password."""

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


class Section(BaseModel):
    """A section of rmvdb.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object) -> object:
        # Otherwise `batch = true` would be a batch of one record.
        if isinstance(value, bool):
            raise ValueError("must be a number or a text, not true or false")
        return value


class MilvusSection(Section):
    """Where the vectors are."""

    uri: str = Field(
        default="",
        description="A file ending in .db (Milvus Lite) or the http(s) address of a server, with a database if it is not "
        "`default`: http://localhost:19530/photos. The default is milvus.db in home.",
    )
    token: SecretStr = Field(
        default=SecretStr(""), description="The user:password or the API key of a server.", examples=["root:Milvus"]
    )
    timeout: Seconds = Field(
        default=10.0,
        description="Seconds, at most 15, after which rmvdb gives up one call to the engine. It sends a search once more. Other "
        "reads have backfill.retry_for seconds to answer.",
    )
    staleness: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Seconds within which the engine shows every write. The default is what the engine promises.",
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


class RegistrySection(Section):
    """Where rmvdb remembers upgrades, batches and intents."""

    url: DatabaseUrl = Field(
        default=DatabaseUrl(""),
        description="A URL such as sqlite:///file or postgresql://user:password@host/database. The default is registry.sqlite "
        "in home.",
        examples=["postgresql://user:password@localhost/rmvdb"],
    )

    @field_validator("url")
    @classmethod
    def _known_database(cls, url: DatabaseUrl) -> DatabaseUrl:
        normal = database_url(url.get_secret_value())
        if normal and not normal.startswith(("sqlite:///", "postgresql+psycopg://")):
            raise ValueError("must begin with sqlite:/// or postgresql://")
        if re.fullmatch(r"sqlite:///+", normal):
            raise ValueError("must name a file, as in sqlite:///registry.sqlite")
        return DatabaseUrl(normal)


class IndexSection(Section):
    """The index of new collections, in Milvus' terms. rmvdb checks it before it makes a collection, and so does doctor."""

    type: Annotated[str, Field(min_length=1)] = Field(
        default="AUTOINDEX",
        description="The type of index. It is one of AUTOINDEX, FLAT, IVF_FLAT, IVF_SQ8, IVF_PQ, HNSW, SCANN, DISKANN, "
        "GPU_CAGRA, GPU_IVF_FLAT, GPU_IVF_PQ and GPU_BRUTE_FORCE. Milvus Lite 2.5 has AUTOINDEX, FLAT and IVF_FLAT.",
    )
    params: dict[str, Any] = Field(
        default={}, description="The parameters that it is built with.", examples=[{"M": 16, "efConstruction": 200}]
    )
    search: dict[str, Any] = Field(
        default={},
        description="The parameters that it is searched with. If ef, search_list, itopk_size or reorder_k is below the limit of "
        "a search, rmvdb raises it to the limit.",
        examples=[{"ef": 128}],
    )

    def value(self) -> types.Index:
        """Return the index as the rest of rmvdb knows it."""
        from rmvdb import types  # here, so that reading settings does not wait for numpy

        return types.Index(type=self.type, params=self.params, search=self.search)


class SearchSection(Section):
    """How clients search."""

    plan_max_age: Seconds = Field(
        default=10.0, description="Seconds for which a client uses a serving plan without asking again."
    )
    longest_search: Seconds = Field(
        default=5.0, description="Seconds after which rmvdb repeats a search of two collections rather than trust it."
    )
    consistency: Literal["Bounded", "Strong"] = Field(
        default="Bounded",
        description="The consistency of searches that do not name theirs. Strong waits, and sees every write that returned "
        "before.",
    )
    keep_queries: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=0,
        description="How many queries of each gallery clients keep in the registry, a uniform sample for the next plan. 0 keeps "
        "none. They are people's words: see docs/how-to/keep-real-queries.md.",
        examples=[2000],
    )
    keep_queries_days: Annotated[float, Field(gt=0, le=3650)] = Field(
        default=30.0, description="Days after which a kept query is neither used nor kept any more."
    )
    rescore_ms: Annotated[float, Field(ge=0)] = Field(
        default=100.0,
        description="Milliseconds that rescoring may add to one search. A record that is not ready in time keeps its calibrated "
        "distance. 0 turns rescoring off.",
    )
    rescore_cache_mb: Annotated[float, Field(ge=0)] = Field(
        default=64.0, description="Megabytes of the vectors that one client keeps from rescoring."
    )


class BackfillSection(Section):
    """How the gallery is moved."""

    batch: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1000,
        description="The most records in one batch. rmvdb takes at most a fiftieth of the records to move, but 20 or more, so "
        "that --until and quality go by small steps.",
    )
    width: Annotated[int, Field(ge=1, le=64)] = Field(
        default=6,
        description="The most batches that one worker has in hand: some are copied, and others leave the old collections. They "
        "mostly wait for a Milvus server's clock. One embeds at a time. The number bounds the memory.",
    )
    lease: Seconds = Field(
        default=40.0,
        description="Seconds for which a worker holds a batch before it must renew. At least three times longest_call.",
    )
    longest_call: Seconds = Field(default=10.0, description="Seconds that one call of a worker may take.")
    retry_for: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="Seconds for which rmvdb tries a call again while the engine or the database does not answer.",
    )
    missing: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.01,
        description="The share of the records, 0 to 1, that may be gone from the old collection without a reason. If more are "
        "gone, the cut-over waits for --accept-missing.",
    )

    @model_validator(mode="after")
    def _lease_outlasts_a_call(self) -> BackfillSection:
        # A worker uses a claim only while its lease has more left than two of the longest calls, and renews it six times a lease.
        if self.lease < 3 * self.longest_call:
            raise ValueError(f"lease ({self.lease:g} s) must be at least three times longest_call ({self.longest_call:g} s)")
        return self


class ItemsSection(Section):
    """The items that records are made from."""

    # The pictures by which rmvdb knows a model have up to 512 × 341. Pillow itself refuses more than twice its own limit.
    max_pixels: Annotated[int, Field(ge=512 * 512, le=178_956_970)] = Field(
        default=50_000_000,
        description="Pixels of the largest picture that rmvdb decodes. A larger one is quarantined, and refused in a write or a "
        "search.",
    )


class ModelsSection(Section):
    """Whose code runs here."""

    allow: tuple[str, ...] = Field(
        default=(),
        description="The modules that model versions, classifiers and call: sources may be of. A package stands for all that is "
        "in it. model add, gallery add and gallery source write this setting.",
        examples=[["models"]],
    )


class ThrottleSection(Section):
    """Limits of the backfill. Limits that rmvdb throttle sets for an upgrade take their place."""

    rate: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Records a second that one worker stays below. The default is no limit.", examples=[500.0]
    )
    nice: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="The share of its time, 0 to 1, in which one worker copies. The default is all of it.",
        examples=[0.5],
    )
    p99_ms: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Milliseconds. No batch begins while the p99 of a client's searches is higher.",
        examples=[100.0],
    )
    flag: Path | None = Field(
        default=None, description="The name of a file. No batch begins while it exists.", examples=["backfill.hold"]
    )

    @field_validator("flag")
    @classmethod
    def _a_name(cls, flag: Path | None) -> Path | None:
        if flag == Path():  # which an empty text becomes: the folder of rmvdb.toml, which always exists
            raise ValueError("must name a file")
        return flag


class ProjectSettings(BaseSettings):
    """All settings. After `config.load` paths are absolute and addresses are filled in."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    home: Path = Field(
        default=Path(".rmvdb"),
        description="The folder for the manifest, artifacts, archive and cache. Machines that share no disk share a folder in a "
        "bucket: s3://bucket/rmvdb.",
    )
    local: Path = Field(
        default=Path(".rmvdb"),
        description="This machine's folder for copies of artifacts, plans and sorting, if home is in a bucket. It can be lost.",
    )
    milvus: MilvusSection = MilvusSection()
    registry: RegistrySection = RegistrySection()
    index: IndexSection = IndexSection()
    indexes: dict[str, IndexSection] = Field(default={}, description="An index for one gallery, instead of [index].")
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
        """Let the environment win over the file, whose content is given to the constructor."""
        return env_settings, init_settings

    @field_validator("home", "local", mode="before")
    @classmethod
    def _not_empty(cls, folder: object) -> object:
        if folder == "":  # as a variable of the shell that is not set; it would be the folder of rmvdb.toml
            raise ValueError("must name a folder; leave it out for .rmvdb beside rmvdb.toml")
        return folder

    @field_validator("home")
    @classmethod
    def _folder_or_bucket(cls, home: Path) -> Path:
        scheme, *inside = home.parts or ("",)
        if re.fullmatch(r"[a-z][a-z0-9+.-]+:", scheme) and (scheme != "s3:" or not inside):
            raise ValueError("must be a folder, or a folder in a bucket whose server speaks S3: s3://bucket/rmvdb")
        if scheme == "s3:" and "@" in inside[0]:
            raise ValueError("must not carry keys; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return home

    @model_validator(mode="after")
    def _call_outlasts_the_engine(self) -> ProjectSettings:
        if self.milvus.timeout > self.backfill.longest_call:
            raise ValueError(
                f"milvus.timeout ({self.milvus.timeout:g} s) must not be longer than "
                f"backfill.longest_call ({self.backfill.longest_call:g} s)"
            )
        return self

    @property
    def bucket(self) -> str | None:
        """The address of home if it is in a bucket."""
        # A path has one of the two slashes of s3://.
        return f"s3://{'/'.join(self.home.parts[1:])}" if self.home.parts[:1] == ("s3:",) else None

    @property
    def folder(self) -> Path:
        """This machine's folder: home, or local if home is in a bucket."""
        return self.local if self.bucket else self.home

    @property
    def artifacts(self) -> Path:
        """The folder of transforms and calibrations."""
        return self.folder / "artifacts"

    @property
    def registry_file(self) -> Path | None:
        """The file of a registry of SQLite."""
        url = self.registry.url.get_secret_value()
        return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:////") else None

    @property
    def cache(self) -> Path:
        """This machine's folder for plans and for sorting."""
        return self.folder / "cache"

    def index_for(self, gallery: str) -> types.Index:
        """Return the index of that gallery's new collections."""
        return self.indexes.get(gallery, self.index).value()
