"""The one door for values from outside: ids, fields, vectors and arguments become canonical or are refused. No engine is here."""
