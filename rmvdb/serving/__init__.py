"""Searches and writes of applications: the client, its serving plan, the loaded models, the merge of legs."""
