"""Searches and writes of applications: the client, the serving plan that it holds, loaded models, the merge of legs."""
