"""Settings come from one file and the environment; whatever is wrong is one sentence with the way out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rmvdb import types
from rmvdb.app import config, config_file, wiring, wrong_settings
from rmvdb.errors import ConfigError
from rmvdb.registry.engine import parsed_url

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder and no variable of ours."""
    for name in list(os.environ):
        if name.upper().startswith("RMVDB_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    file = folder / "rmvdb.toml"
    file.write_text(text, encoding="utf-8")
    return file


def sentence(file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_file_the_defaults_live_in_the_current_folder(folder: Path) -> None:
    settings = config.load()
    assert settings.home == folder / ".rmvdb"
    assert settings.milvus.uri == str(folder / ".rmvdb" / "milvus.db")
    assert settings.registry.url.get_secret_value() == f"sqlite:///{folder}/.rmvdb/registry.sqlite"
    assert (settings.artifacts, settings.cache) == tuple(folder / ".rmvdb" / name for name in ("artifacts", "cache"))
    assert (settings.folder, settings.bucket) == (settings.home, None)
    assert list(folder.iterdir()) == []


def test_a_source_starts_at_the_file_wherever_home_is(folder: Path) -> None:
    app = wiring.load(written(folder, f'home = "{folder.parent}/elsewhere/.rmvdb"'))
    assert app.base == folder


BUCKET = 'home = "s3://search/team/rmvdb"\n[milvus]\nuri = "http://milvus:19530"\n'


def test_a_home_in_a_bucket_leaves_a_local_folder_on_each_machine(folder: Path) -> None:
    settings = config.load(written(folder, f'{BUCKET}[registry]\nurl = "postgresql://db/rmvdb"'))
    assert settings.bucket == "s3://search/team/rmvdb"
    assert settings.folder == folder / ".rmvdb"
    assert settings.artifacts == folder / ".rmvdb" / "artifacts"
    settings = config.load(written(folder, f'local = "/var/tmp/rmvdb"\n{BUCKET}[registry]\nurl = "postgresql://db/rmvdb"'))
    assert settings.folder == Path("/var/tmp/rmvdb")


def test_a_bucket_cannot_hold_a_database(folder: Path) -> None:
    written(folder, BUCKET)
    assert "home is in a bucket, s3://search/team/rmvdb, which cannot hold a database; set registry.url, too" in sentence()
    written(folder, 'home = "s3://search/rmvdb"')
    assert "set milvus.uri, too" in sentence()


@pytest.mark.parametrize("home", ["gs://search/rmvdb", "http://x/y", "s3://"])
def test_another_address_is_no_home(folder: Path, home: str) -> None:
    written(folder, f'home = "{home}"')
    assert "must be a folder, or a folder in a bucket whose server speaks S3: s3://bucket/rmvdb" in sentence()


def test_the_file_is_found_from_a_folder_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, 'home = "data"\n[milvus]\nuri = "vectors/milvus.db"\n[registry]\nurl = "sqlite:///jobs.sqlite"')
    (folder / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(folder / "a" / "b")
    settings = config.load()
    assert settings.home == folder / "data"
    assert settings.milvus.uri == str(folder / "vectors" / "milvus.db")
    assert settings.registry.url.get_secret_value() == f"sqlite:///{folder}/jobs.sqlite"


@pytest.mark.parametrize("name", ["a?b", "50%41"])
def test_a_folder_that_would_be_another_one_in_the_registrys_url_is_refused_by_name(folder: Path, name: str) -> None:
    (there := folder / name).mkdir()
    file = written(there, "")
    assert f"{there}/.rmvdb cannot hold the registry: in the URL of a database a ? ends the path" in sentence(file)
    written(there, '[registry]\nurl = "sqlite:///jobs.sqlite"')
    assert f"{there} cannot hold the registry" in sentence(file)
    for elsewhere in (f"sqlite:///{folder}/jobs.sqlite", "sqlite:///:memory:", "postgresql+psycopg://db/rmvdb"):
        written(there, f'[registry]\nurl = "{elsewhere}"')
        assert config.load(file).registry.url.get_secret_value() == elsewhere


@pytest.mark.parametrize("name", ["50 %", "a#b", "ü & co"])
def test_in_any_other_folder_the_registry_is_where_the_settings_say(folder: Path, name: str) -> None:
    (there := folder / name).mkdir()
    settings = config.load(written(there, ""))
    assert settings.registry_file == there / ".rmvdb" / "registry.sqlite"
    assert parsed_url(settings.registry.url.get_secret_value()).database == str(settings.registry_file)


@pytest.mark.parametrize("text", ['home = "~nobody-here/x"', '[registry]\nurl = "sqlite:///~nobody-here/x"'])
def test_the_home_of_a_user_that_nobody_knows_is_a_sentence(folder: Path, text: str) -> None:
    written(folder, text)
    assert "'~nobody-here/x' cannot be found, because the home of its user is unknown; write the whole path" in sentence()
    assert "'~nobody-here/x' cannot be found" in sentence(Path("~nobody-here/x"))


def test_an_argument_wins_over_the_variable_and_that_over_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "variable", "argument"):
        (folder / name).mkdir()
        written(folder / name, "")
    monkeypatch.chdir(folder / "here")
    assert config.load().home == folder / "here" / ".rmvdb"
    monkeypatch.setenv("RMVDB_CONFIG", str(folder / "variable" / "rmvdb.toml"))
    assert config.load().home == folder / "variable" / ".rmvdb"
    assert config.load(folder / "argument").home == folder / "argument" / ".rmvdb"


def test_the_environment_wins_key_by_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, "[backfill]\nbatch = 10\nwidth = 2")
    monkeypatch.setenv("RMVDB_BACKFILL__BATCH", "20")
    monkeypatch.setenv("rmvdb_milvus__uri", "http://milvus:19530")
    settings = config.load()
    assert (settings.backfill.batch, settings.backfill.width) == (20, 2)
    assert settings.milvus.uri == "http://milvus:19530"


def test_a_gallery_can_have_an_index_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(
        folder,
        '[index]\ntype = "FLAT"\n[indexes.photos]\ntype = "HNSW"\nparams = { M = 8 }\nsearch = { ef = 50 }\n[indexes."a.b"]',
    )
    settings = config.load()
    assert settings.index_for("texts") == types.Index(type="FLAT")
    assert settings.index_for("photos") == types.Index(type="HNSW", params={"M": 8}, search={"ef": 50})
    assert settings.index_for("a.b") == types.Index()
    monkeypatch.setenv("RMVDB_INDEXES__PHOTOS__PARAMS", '{"M": 32}')
    assert config.load().index_for("photos").params == {"M": 32}


@pytest.mark.parametrize("url", ["postgresql://u:s3cret@h/db", "postgres://u:s3cret@h/db", "postgresql+psycopg://u:s3cret@h/db"])
def test_a_postgres_address_gets_its_driver_and_never_shows_its_password(folder: Path, url: str) -> None:
    written(folder, f'[registry]\nurl = "{url}"\n[milvus]\ntoken = "root:s3cret"')
    settings = config.load()
    assert settings.registry.url.get_secret_value() == "postgresql+psycopg://u:s3cret@h/db"
    assert settings.milvus.token.get_secret_value() == "root:s3cret"
    for shown in (repr(settings), str(settings), settings.model_dump_json(), f"{settings.registry.url}"):
        assert "s3cret" not in shown
    assert str(settings.registry.url) == "postgresql+psycopg://u:***@h/db"


@pytest.mark.parametrize(
    "url", ["postgresql://u:a@b:c@h/db", "postgresql://u@h/db?password=a@b", "mysql://u:a@b@h", "x://:a@b@h"]
)
def test_no_error_shows_a_password(folder: Path, url: str) -> None:
    written(folder, f'[registry]\nurl = "{url}"\n[backfill]\nbatch = 0')
    assert "a@b" not in sentence()


@pytest.mark.parametrize("uri", ["https://a-key@host:19530", "https://a-key@host:port", "s3://a-key@host", "a-key@host"])
def test_no_error_shows_a_key_that_stands_where_a_user_belongs(folder: Path, uri: str) -> None:
    written(folder, f'[milvus]\nuri = "{uri}"')
    assert "milvus.uri must" in sentence()
    assert "a-key" not in sentence()


def test_no_error_shows_a_key_in_a_buckets_address(folder: Path) -> None:
    written(folder, 'home = "s3://AKIA:a-key@bucket/rmvdb"')
    assert "home must not carry keys; give them as AWS_ACCESS_KEY_ID" in sentence()
    assert "a-key" not in sentence()


def test_a_path_that_cannot_be_looked_at_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be looked at: File name too long; correct the rights"):
        config.load(folder / ("x" * 5000))


def test_the_flag_file_lies_beside_the_settings(folder: Path) -> None:
    assert config.load(written(folder, "")).throttle.flag is None
    assert config.load(written(folder, '[throttle]\nflag = "ops/hold"')).throttle.flag == folder / "ops" / "hold"
    assert config.load(written(folder, '[throttle]\nflag = "/run/hold"')).throttle.flag == Path("/run/hold")


def test_addresses_with_a_scheme_are_left_as_they_are(folder: Path) -> None:
    for uri in ("https://x.zillizcloud.com:443", "unix:/tmp/milvus.sock", "/absolute/milvus.db"):
        assert config.load(written(folder, f'[milvus]\nuri = "{uri}"')).milvus.uri == uri
    assert (
        config.load(written(folder, '[registry]\nurl = "sqlite:///:memory:"'))
        .registry.url.get_secret_value()
        .endswith(":memory:")
    )
    assert config.load(written(folder, 'home = "~/rmvdb"')).home == Path.home() / "rmvdb"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('hom = "x"', "there is no setting 'hom'; did you mean 'home'?"),
        ('[milvus]\nur = "x"', "there is no setting 'milvus.ur'; did you mean 'milvus.uri'?"),
        ("batch = 3", "there is no setting 'batch'; did you mean 'backfill.batch'?"),
        ("[backfil]\nbatch = 3", "there is no setting 'backfil'; did you mean 'backfill'?"),
        ('[indexes.photos]\ntipe = "x"', "there is no setting 'indexes.photos.tipe'; did you mean 'indexes.photos.type'?"),
        ('[indexes]\ntype = "x"', "indexes.type must be a section; write [indexes.type] and its keys below"),
        (
            "[zzz]\nq = 1",
            "there is no setting 'zzz'; there are: "
            "'home', 'local', 'milvus', 'registry', 'index', 'indexes', 'search', 'backfill', 'items', 'models', 'throttle'",
        ),
        ("milvus = 3", "milvus must be a section; write [milvus] and its keys below"),
        ("home = 3", 'home = 3 must be a path, such as ".rmvdb": the folder for the manifest, artifacts, archive and cache'),
        (
            '[backfill]\nbatch = "many"',
            "backfill.batch = 'many' must be a valid integer, such as 1000: the most records in one batch",
        ),
        (
            "[backfill]\nbatch = 0",
            "backfill.batch = 0 must be greater than or equal to 1, such as 1000: the most records in one batch",
        ),
        ("[backfill]\nbatch = true", "backfill.batch = True must be a number or a text, not true or false"),
        ("[backfill]\nlease = 5", "backfill: lease (5 s) must be at least three times longest_call (10 s); change one of them"),
        (
            "[milvus]\ntimeout = 12",
            "milvus.timeout (12 s) must not be longer than backfill.longest_call (10 s); change one of them",
        ),
        (
            "[milvus]\ntimeout = 15.1\n[backfill]\nlongest_call = 40\nlease = 120",
            "milvus.timeout = 15.1 must be 15 or less: a write of several calls must end within 30 s",
        ),
        (
            '[milvus]\nuri = "vectors"',
            "milvus.uri = 'vectors' must be a file ending in .db or an address such as http://localhost:19530",
        ),
        *(
            (
                f'[milvus]\nuri = "http://{wrong}"',
                f"milvus.uri = 'http://{wrong}' must name a host, and a port up to 65535, such as http://localhost:19530",
            )
            for wrong in ("", ":19530", "milvus:port", "milvus:99999")
        ),
        (
            '[milvus]\nuri = "http://me:secret@host"',
            "milvus.uri must not carry a password; write it to milvus.token as user:password",
        ),
        (
            "[milvus]\ntoken = 3",
            'milvus.token must be a valid string, such as "root:Milvus": the user:password or the API key of a server',
        ),
        ('[registry]\nurl = "mysql://h/db"', "registry.url = 'mysql://h/db' must begin with sqlite:/// or postgresql://"),
        (
            "[throttle]\nrate = inf",
            "throttle.rate = inf must be a finite number, such as 500.0: records a second that one worker stays below",
        ),
        (
            "[throttle]\nnice = 50",
            "throttle.nice = 50 must be less than or equal to 1, such as 0.5: "
            "the share of its time, 0 to 1, in which one worker copies",
        ),
        (
            "[search]\ngrace = 5",
            "there is no setting 'search.grace'; there are: 'search.plan_max_age', 'search.longest_search', "
            "'search.consistency', 'search.keep_queries', 'search.keep_queries_days', 'search.rescore_ms', "
            "'search.rescore_cache_mb'; parameters of Milvus' index, such as ef or "
            "nlist, go into index.params or index.search, and the index of one gallery into [indexes.<gallery>]",
        ),
        (
            '[index.photos]\ntype = "HNSW"',
            "there is no setting 'index.photos'; there are: 'index.type', 'index.params', 'index.search'; parameters of Milvus' "
            "index, such as ef or nlist, go into index.params or index.search, and the index of one gallery into "
            "[indexes.<gallery>]",
        ),
        (
            "[milvus]\nuser = 'root'",
            "there is no setting 'milvus.user'; there are: 'milvus.uri', 'milvus.token', 'milvus.timeout', 'milvus.staleness'",
        ),
        ("[milvus]\nconsistency = 'Strong'", "there is no setting 'milvus.consistency'; did you mean 'search.consistency'?"),
        (
            "[index]\nparams = 'M=16'",
            "index.params = 'M=16' must be a valid table, such as { M = 16, efConstruction = 200 }: "
            "the parameters that it is built with",
        ),
        ('[registry]\nurl = "sqlite://x.db"', "registry.url = 'sqlite://x.db' must begin with sqlite:/// or postgresql://"),
        ("[throttle]\np99 = 100", "there is no setting 'throttle.p99'; did you mean 'throttle.p99_ms'?"),
        ('[throttle]\nflag = ""', "throttle.flag = '' must name a file"),
        (
            '[index]\ntype = ""',
            "index.type = '' must have at least 1 character, such as \"AUTOINDEX\": the type of index",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence_with_the_way_out(folder: Path, text: str, problem: str) -> None:
    assert sentence(written(folder, text)) == f"{folder / 'rmvdb.toml'}: {problem}"


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("RMVDB_MILVUS__UR", "x", "Environment: there is no setting RMVDB_MILVUS__UR; did you mean RMVDB_MILVUS__URI?"),
        ("RMVDB_BATCH", "3", "Environment: there is no setting RMVDB_BATCH; did you mean RMVDB_BACKFILL__BATCH?"),
        ("RMVDB_MILVUS_URI", "x", "Environment: there is no setting RMVDB_MILVUS_URI; did you mean RMVDB_MILVUS__URI?"),
        (
            "RMVDB_INDEX__PARAMS__M",
            "3",
            "Environment: there is no setting RMVDB_INDEX__PARAMS__M; write RMVDB_INDEX__PARAMS as JSON, such as '{\"M\": 16}'",
        ),
        (
            "RMVDB_BACKFILL__BATCH",
            "x",
            "RMVDB_BACKFILL__BATCH: backfill.batch = 'x' must be a valid integer, such as 1000: the most records in one batch",
        ),
        ("RMVDB_MILVUS", "3", "RMVDB_MILVUS: milvus must be a section; write [milvus] and its keys below"),
    ],
)
def test_a_wrong_variable_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    written(folder, "[backfill]\nbatch = 5")
    monkeypatch.setenv(variable, value)
    assert sentence() == problem


def test_a_section_that_is_no_json_in_the_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMVDB_MILVUS", "http://x")
    assert sentence().startswith('Environment: error parsing value for field "milvus"')
    assert sentence().endswith("write JSON, or one variable for each key as in RMVDB_MILVUS__URI")


def test_a_file_that_is_missing_or_no_toml_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence(folder / "no.toml") == f"{folder}/no.toml is not there; run `rmvdb init` in its folder or name another file"
    assert re.search(r"is not valid TOML: .*line 2.*; correct that line", sentence(written(folder, "[milvus]\nuri x")))
    (folder / "rmvdb.toml").write_bytes(b"home = '\xff'")
    assert sentence() == f"{folder}/rmvdb.toml is not UTF-8 text; save it as UTF-8"
    monkeypatch.setenv("RMVDB_CONFIG", "gone.toml")
    assert sentence().startswith(f"{folder}/gone.toml (named by RMVDB_CONFIG) is not there;")


def test_the_template_says_every_default_and_every_line_of_it_works(folder: Path) -> None:
    text = config_file.template()
    assert config.load(written(folder, text)) == config.load(written(folder, ""))
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"# \w+ = .*", line) and "[indexes.photos]" not in "\n".join(lines[max(0, number - 3) : number]):
            changed = "\n".join([*lines[:number], line[2:], *lines[number + 1 :]])
            config.load(written(folder, changed))
    galleries = text[text.index("# [indexes.photos]") :].replace("# ", "")
    assert config.load(written(folder, galleries)).index_for("photos").type == "HNSW"
    known = {".".join(keys) for keys in wrong_settings.known() if len(keys) > 1 and keys[0] != "indexes"}
    shown = tomllib.loads(re.sub(r"(?m)^# (\w+ = )", r"\1", text[: text.index("# [indexes.photos]")]))
    assert {f"{name}.{key}" for name, section in shown.items() if isinstance(section, dict) for key in section} == known


def test_a_comment_of_the_template_is_not_wider_than_a_screen() -> None:
    assert max(map(len, config_file.template().splitlines())) <= 110


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.load().backfill.batch = 3


def test_reading_settings_loads_nothing_heavy() -> None:
    script = (
        "import sys, rmvdb.app.config; rmvdb.app.config.load()\n"
        "print([name for name in ('torch', 'pyarrow', 'faiss', 'pymilvus', 'sqlalchemy', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[models]\nallow = ["a", "b.c"]\n'),
        ("# mine\nhome = 'x' # here", '# mine\nhome = \'x\' # here\n\n[models]\nallow = ["a", "b.c"]\n'),
        ("[models]", '[models]\nallow = ["a", "b.c"]\n'),
        ("[models] # code\n# allow = ['models']\n\n[throttle]\nrate = 1 # slow\n", None),
        (
            "[models]\nallow = [] # none yet\n[backfill]\nbatch = 7\n",
            '[models]\nallow = ["a", "b.c"] # none yet\n[backfill]\nbatch = 7\n',
        ),
        (
            '[models]\n# of ours\nallow = [\n  "a",\n  "x",\n]\n[backfill]\n',
            '[models]\n# of ours\nallow = ["a", "b.c"]\n[backfill]\n',
        ),
        ("[search]\nplan_max_age = 9\n[models]\n\n[indexes.allow]\ntype = 'FLAT'\n", None),
    ],
)
def test_a_module_is_allowed_and_all_else_in_the_file_stays(folder: Path, before: str, after: str | None) -> None:
    file = written(folder, before)
    file.chmod(0o640)
    was = config.load(file)
    config_file.allow(file, ["a", "b.c"])
    text = file.read_text()
    assert after in (None, text)
    assert [line for line in before.splitlines() if "#" in line and "allow" not in line] == [
        line for line in text.splitlines() if "#" in line and "allow" not in line
    ]
    now = config.load(file)
    assert now.models.allow == ("a", "b.c")
    assert now.model_dump(exclude={"models"}) == was.model_dump(exclude={"models"})
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["models = { allow = [] }", "models.allow = ['x']", "[models]\nallow = ['x', # ]\n'y']\n"])
def test_a_file_that_is_written_otherwise_is_left_and_the_line_is_named(folder: Path, text: str) -> None:
    file = written(folder, text)
    with pytest.raises(ConfigError, match=r'could not be changed .*; write allow = \["a"\] there, below \[models\]'):
        config_file.allow(file, ["a"])
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('home = ""', "home = '' must name a folder; leave it out for .rmvdb beside rmvdb.toml"),
        ('[registry]\nurl = "sqlite:///"', "must name a file, as in sqlite:///registry.sqlite"),
        ("[models]\nallow = [5]", "models.allow = 5 must be a valid string"),
        ('[models]\nallow = "models"', "models.allow = 'models' must be a list"),
    ],
)
def test_an_empty_place_and_a_wrong_list_are_named(folder: Path, text: str, problem: str) -> None:
    assert problem in sentence(written(folder, text))


def test_a_variable_of_the_shell_that_is_empty_is_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMVDB_HOME", "")
    assert "RMVDB_HOME: home = '' must name a folder" in sentence()


@pytest.mark.parametrize("what", ["a folder", "a link to nothing"])
def test_an_rmvdb_toml_that_cannot_be_read_is_not_passed_over(folder: Path, what: str) -> None:
    """As if a volume were not mounted: with the defaults rmvdb would make another, empty registry."""
    if what == "a folder":
        (folder / "rmvdb.toml").mkdir()
    else:
        (folder / "rmvdb.toml").symlink_to(folder / "none")
    assert f"{folder}/rmvdb.toml is not a file that can be read" in sentence()


@pytest.mark.parametrize("url", ["rmvdb:hidden@db.example.com/rmvdb", "postgresql//rmvdb:hidden@db.example.com/rmvdb"])
def test_a_password_in_an_address_without_a_scheme_is_not_shown(tmp_path: Path, url: str) -> None:
    (tmp_path / "rmvdb.toml").write_text(f'[registry]\nurl = "{url}"\n')
    with pytest.raises(ConfigError, match=r"registry\.url") as caught:
        config.load(tmp_path / "rmvdb.toml")
    assert "hidden" not in str(caught.value)


def test_the_variables_of_a_service_in_kubernetes_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("RMVDB_MILVUS_SERVICE_HOST", "10.0.0.7"),
        ("RMVDB_MILVUS_SERVICE_PORT", "19530"),
        ("RMVDB_MILVUS_SERVICE_PORT_METRICS", "9091"),
        ("RMVDB_MILVUS_PORT", "tcp://10.0.0.7:19530"),
        ("RMVDB_MILVUS_PORT_19530_TCP", "tcp://10.0.0.7:19530"),
        ("RMVDB_MILVUS_PORT_19530_TCP_ADDR", "10.0.0.7"),
    ):
        monkeypatch.setenv(name, value)
    assert config.load().milvus.uri == config.load().milvus.uri
    monkeypatch.setenv("RMVDB_MILVUS_PORT", "19530")
    with pytest.raises(ConfigError, match="there is no setting RMVDB_MILVUS_PORT"):
        config.load()
