"""The tables of the two papers that rmvdb implements, computed again on your own copy of the data sets.

    python -m examples.paper_tables cifar100-extended-class --data FOLDER

`data` reads the sets, `tasks` says which pictures each model learns, `models` trains the models and keeps their embeddings,
`rows` measures the methods, `settings` puts a table together, `published` holds the papers' numbers, `report` writes both.
"""
