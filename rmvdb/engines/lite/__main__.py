"""`python -m rmvdb.engines.lite PATH`: the owner of one Milvus Lite file."""

from rmvdb.engines.lite.owner import main

main()
