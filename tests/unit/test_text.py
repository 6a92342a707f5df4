"""Addresses as they may be shown: no password, and no part of one, is left in them."""

from __future__ import annotations

import pytest

from rmvdb.text import without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me@h/db", "postgresql://me@h/db"),
        ("postgresql://me:hidden@h/db", "postgresql://me:***@h/db"),
        ("postgresql://me:${HIDDEN}@h:${PORT}/db", "postgresql://me:${HIDDEN}@h:${PORT}/db"),
        ("postgresql://me@h/db?sslmode=require&password=hidden", "postgresql://me@h/db?password=***&sslmode=require"),
        ("trino://me@h/db?Access_Token=hidden", "trino://me@h/db?Access_Token=***"),
        ("mssql+pyodbc://me@/?odbc_connect=UID%3Dme%3BPWD%3D%7Bhidden%3B%7D", "mssql+pyodbc://me@/?odbc_connect=***"),
        ("mssql+pyodbc://me@/?odbc_connect=UID=me;PWD={${HIDDEN}}", "mssql+pyodbc://me@/?odbc_connect=UID=me;PWD={${HIDDEN}}"),
        ("postgresql://me:hidden@h:port/db", "postgresql://***"),
        ("postgresql://me:hid@den@h/db", "postgresql://***"),
        ("postgresql://me@h:port/db?password=hidden", "postgresql://***"),
        ("sql:postgresql://me:hidden@h/db", "sql:postgresql://***"),
        ("UID=me; PWD+%3Dhidden", "***"),
        ("cannot reach postgresql://me:hidden@h/db today", "postgresql://***"),
        ('connection to "h" failed: password authentication failed for user "me"',) * 2,
        ("http://milvus:19530",) * 2,
        ("http://milvus:port",) * 2,
        ("/home/me@work/milvus.db",) * 2,
    ],
)
def test_an_address_is_shown_without_its_password_and_one_that_cannot_be_parsed_by_its_scheme(url: str, shown: str) -> None:
    assert without_password(url) == shown
