def check(index, *, dim, metric):
    return None
