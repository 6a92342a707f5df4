"""ψ in closed form equals its formulas, written out in slow loops, and leads to the old space."""

import numpy as np
import pytest
import torch

from rmvdb.errors import PlanRefused, UnknownName
from rmvdb.learning import closed_forms, geometry
from rmvdb.learning.closed_forms import variants
from rmvdb.learning.method import METHODS, Method, Pairs, TrainingSettings
from rmvdb.learning.training import fit
from rmvdb.learning.transforms import Transform
from rmvdb.types import Metric

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}
IP = {"old_metric": Metric.IP, "new_metric": Metric.IP}
L2 = {"old_metric": Metric.L2, "new_metric": Metric.L2}
CLOSED = [method for method in Method if method.is_closed_form]


def rotation(dim, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0]


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def vectors(n, dim, seed, *, middle=0.0):
    return (np.random.default_rng(seed).normal(size=(n, dim)) + middle).astype(np.float32)


def related(n, d_new, d_old, seed=0):
    """Old vectors that are a poor view of the new ones, both off the origin."""
    new = vectors(n, d_new, seed, middle=0.4)
    view = np.random.default_rng(7).normal(size=(d_new, d_old))
    return Pairs(old=(new @ view / d_new**0.5 + 0.5 * vectors(n, d_old, seed + 1) + 0.3).astype(np.float32), new=new)


def first(method, pairs, metrics):
    return variants(method, pairs, **metrics)[0][1]


# --- the formulas, in slow loops --------------------------------------------------------------------------------------


def nearest_orthogonal(x, y):
    """UVᵀ by the polar decomposition of the cross product, one pair at a time, of full rank."""
    product = sum(np.outer(a, b) for a, b in zip(x, y, strict=True))
    values, axes = np.linalg.eigh(product.T @ product)
    return product @ axes @ np.diag(values**-0.5) @ axes.T


def slow_centred(pairs, query, *, old_mean=False):
    x, y = unit(pairs.new.astype(float)), unit(pairs.old.astype(float))
    mean_new, mean_old = sum(x) / len(x), sum(y) / len(y)
    turned = (unit(query) - mean_new) @ nearest_orthogonal(x - mean_new, y - mean_old)
    return unit(turned + mean_old) if old_mean else unit(turned)


def slow_neighbours(pairs, query, *, weight, tau):
    x, y = unit(pairs.new.astype(float)), unit(pairs.old.astype(float))
    nearest = sorted(range(len(x)), key=lambda i: -float(unit(query) @ x[i]))[:10]
    shares = [np.exp(float(unit(query) @ x[i]) / tau) for i in nearest]
    transported = sum(share * y[i] for share, i in zip(shares, nearest, strict=True)) / sum(shares)
    return unit((1 - weight) * slow_centred(pairs, query) + weight * unit(transported - sum(y) / len(y)))


def test_procrustes_is_the_orthogonal_map_nearest_to_the_pairs():
    pairs, queries = related(80, 9, 6), vectors(7, 9, 5)
    expected = [unit(unit(q.astype(float)) @ nearest_orthogonal(unit(pairs.new), unit(pairs.old))) for q in queries]
    np.testing.assert_allclose(first(Method.PROCRUSTES, pairs, COSINE).apply(queries), expected, atol=1e-5)


def test_centred_turns_what_is_left_of_a_query_without_the_mean_and_adds_the_old_mean_where_that_is_asked():
    pairs, queries = related(80, 9, 6), vectors(7, 9, 5)
    found = variants(Method.CENTRED, pairs, **COSINE)
    assert [settings for settings, _ in found] == [{"old_mean": False}, {"old_mean": True}]
    for settings, transform in found:
        expected = [slow_centred(pairs, q.astype(float), **settings) for q in queries]
        np.testing.assert_allclose(transform.apply(queries), expected, atol=1e-5)


def test_neighbours_go_between_the_centred_map_and_the_ten_nearest_pairs():
    pairs, queries = related(80, 9, 6), vectors(7, 9, 5, middle=0.4)
    found = variants(Method.NEIGHBOURS, pairs, **COSINE)
    assert sorted(tuple(settings.values()) for settings, _ in found) == [(w, t) for w in (0.2, 0.5, 0.8) for t in (0.05, 0.1)]
    for settings, transform in found:
        expected = [slow_neighbours(pairs, q.astype(float), **settings) for q in queries]
        np.testing.assert_allclose(transform.apply(queries), expected, atol=1e-4)


@pytest.mark.parametrize("metrics", [COSINE, L2], ids=["COSINE", "L2"])
def test_ridge_is_scikit_learns_with_the_lambda_that_does_best_on_held_out_pairs(metrics):
    from sklearn.linear_model import Ridge

    pairs, queries = related(90, 10, 7), vectors(20, 10, 5)
    cosine = metrics is COSINE
    x, y = (unit(each.astype(float)) if cosine else each.astype(float) for each in (pairs.new, pairs.old))
    if not cosine:  # in units of the spread
        x, y = (each / np.sqrt(np.square(each - each.mean(0)).sum(1).mean()) for each in (x, y))
    rows = np.random.default_rng(0).permutation(90)
    held, kept = rows[:14], rows[14:]  # 15 %

    def fitted(rows, share):
        centred = x[rows] - x[rows].mean(0)
        return Ridge(alpha=share * np.trace(centred.T @ centred) / 10).fit(x[rows], y[rows])

    def distance(share):
        made = fitted(kept, share).predict(x[held])
        errors = -(unit(made) * unit(y[held])).sum(1) if cosine else np.square(made - y[held]).sum(1)
        return errors.mean()

    best = min(closed_forms.LAMBDAS, key=distance)
    assert len({round(distance(each), 6) for each in closed_forms.LAMBDAS}) > 5
    ((settings, transform),) = variants(Method.RIDGE, pairs, **metrics)
    assert settings == {"lambda": best}
    if cosine:
        expected = unit(fitted(range(90), best).predict(unit(queries)))
    else:
        spreads = [np.sqrt(np.square(each - each.mean(0)).sum(1).mean()) for each in (pairs.new, pairs.old)]
        expected = fitted(range(90), best).predict(queries / spreads[0]) * spreads[1]
    np.testing.assert_allclose(transform.apply(queries), expected, atol=1e-4)


def test_lambda_is_tried_over_six_decades():
    assert closed_forms.LAMBDAS[-1] / closed_forms.LAMBDAS[0] == pytest.approx(1e6)


# --- what they are good for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CLOSED)
def test_a_space_that_was_turned_is_recovered(method):
    turn = rotation(12)
    new, other = vectors(400, 12, 1), vectors(20, 12, 2)
    found = first(method, Pairs(old=(3 * new @ turn).astype(np.float32), new=new), COSINE)
    # Not quite by neighbours, and means of what lies around the origin are nearly 0.
    least = {Method.PROCRUSTES: 1 - 1e-6, Method.RIDGE: 1 - 1e-6, Method.CENTRED: 0.98, Method.NEIGHBOURS: 0.9}[method]
    assert (found.apply(other) * unit(other @ turn)).sum(1).min() > least


@pytest.mark.parametrize("method", [Method.PROCRUSTES, Method.RIDGE, Method.CENTRED])
def test_for_l2_a_space_that_was_turned_enlarged_and_moved_is_recovered(method):
    turn, shift = rotation(8, 3), 20 * np.arange(8) - 3.0
    new, other = vectors(60, 8, 4), vectors(20, 8, 5)
    pairs = Pairs(old=(2 * new @ turn + shift).astype(np.float32), new=new)
    np.testing.assert_allclose(first(method, pairs, L2).apply(other), 2 * other @ turn + shift, atol=5e-3)


def test_for_l2_what_is_mapped_spreads_as_far_as_the_old_vectors_and_has_their_mean():
    pairs = related(200, 10, 6)
    for method in (Method.PROCRUSTES, Method.CENTRED):
        found = first(method, pairs, L2).apply(pairs.new)
        np.testing.assert_allclose(found.mean(0), pairs.old.mean(0), atol=1e-4)
        assert np.var(found, axis=0).sum() == pytest.approx(np.var(pairs.old, axis=0).sum(), rel=1e-4)
    assert [settings for settings, _ in variants(Method.CENTRED, pairs, **L2)] == [{"old_mean": True}]


def test_for_l2_neighbours_keep_lengths():
    pairs, queries = related(80, 9, 6), vectors(7, 9, 5, middle=0.4)
    x, y = pairs.new.astype(float), pairs.old.astype(float)
    spread = np.sqrt(np.square(x - x.mean(0)).sum(1).mean())
    carried = first(Method.CENTRED, pairs, L2).apply(queries)
    for settings, transform in variants(Method.NEIGHBOURS, pairs, **L2):
        for query, straight, found in zip(queries, carried, transform.apply(queries), strict=True):
            squares = np.square(x - query).sum(1) / spread**2
            nearest = np.argsort(squares)[:10]
            shares = np.exp(-squares[nearest] / 2 / settings["tau"])
            transported = shares @ y[nearest] / shares.sum()
            w = settings["weight"]
            np.testing.assert_allclose(found, (1 - w) * straight + w * transported, atol=1e-4)


@pytest.mark.parametrize(("d_new", "d_old"), [(16, 6), (6, 16)])
@pytest.mark.parametrize("method", [Method.PROCRUSTES, Method.CENTRED])
def test_between_two_dimensions_it_is_semi_orthogonal_and_no_other_such_map_has_a_larger_trace(method, d_new, d_old):
    new, old = unit(vectors(200, d_new, 6)), unit(vectors(200, d_old, 7))
    weight = first(method, Pairs(old=old, new=new), COSINE).linear[0].T.astype(np.float64)  # (d_new, d_old)
    small = weight.T @ weight if d_new > d_old else weight @ weight.T
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-5)
    if method is Method.CENTRED:
        new, old = new - new.mean(0), old - old.mean(0)
    cross = new.T.astype(np.float64) @ old
    for seed in range(50):
        other = rotation(max(d_new, d_old), seed)[:d_new, :d_old]
        assert np.trace(other.T @ cross) <= np.trace(weight.T @ cross) + 1e-5


def test_of_two_metrics_each_side_is_fitted_by_its_own():
    pairs = related(100, 8, 5)
    for old in (Metric.COSINE, Metric.IP, Metric.L2):
        for new in (Metric.COSINE, Metric.IP, Metric.L2):
            for method in CLOSED:
                found = first(method, pairs, {"old_metric": old, "new_metric": new})
                reached, others = found.apply(pairs.new), geometry.distances(pairs.old[::-1], pairs.old, metric=old)
                own = np.diagonal(geometry.distances(reached, pairs.old, metric=old)).mean()
                assert own < others.mean()
                again = found.apply(3 * pairs.new)
                assert np.allclose(again, reached, atol=1e-5) == (new is not Metric.L2)  # a length that ranks nothing


@pytest.mark.parametrize("method", CLOSED)
def test_for_inner_products_every_query_has_the_length_of_the_old_records(method):
    new, old = vectors(80, 6, 14), vectors(80, 4, 15) * 7
    for _, found in variants(method, Pairs(old=old, new=new), **IP):
        np.testing.assert_allclose(np.linalg.norm(found.apply(new), axis=1), np.linalg.norm(old, axis=1).mean(), rtol=1e-5)


# --- files, refusals, the door of training ----------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [COSINE, IP, L2], ids=["COSINE", "IP", "L2"])
@pytest.mark.parametrize("method", CLOSED)
def test_every_variant_is_a_file_that_gives_it_back_and_is_the_same_each_time(method, metrics):
    pairs, queries = related(60, 6, 4), vectors(5, 6, 3)
    for (settings, one), (_, two) in zip(variants(method, pairs, **metrics), variants(method, pairs, **metrics), strict=True):
        data = one.to_bytes()
        assert data == two.to_bytes() == Transform.from_bytes(data).to_bytes(), settings
        again = Transform.from_bytes(data)
        assert again.config == one.config
        assert again.apply(queries).tobytes() == one.apply(queries).tobytes()


def test_the_callers_random_numbers_stay_as_they_are():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    for method in CLOSED:
        variants(method, related(60, 6, 4), **COSINE)
    assert torch.rand(1) == expected


def test_the_hyperboloid_bears_no_linear_map():
    for old, new in ((Metric.LORENTZ, Metric.COSINE), (Metric.COSINE, Metric.LORENTZ)):
        for method in CLOSED:
            with pytest.raises(PlanRefused, match=f"{method} adds and turns vectors, which leads off the hyperboloid"):
                variants(method, related(60, 6, 4), old_metric=old, new_metric=new)


def test_too_few_and_broken_pairs_and_other_methods_are_refused():
    broken = related(60, 6, 4)
    broken.new[3, 2] = np.nan
    for bad, message in ((related(4, 6, 4), "larger sample"), (broken, "new model's embedder")):
        with pytest.raises(PlanRefused, match=message):
            variants(Method.CENTRED, bad, **COSINE)
    with pytest.raises(UnknownName, match="is called 'rm'; there are: centred, neighbours, procrustes, ridge"):
        variants(Method.RM, related(60, 6, 4), **COSINE)


@pytest.mark.parametrize("method", CLOSED)
def test_training_a_method_in_closed_form_gives_its_first_variant_of_records_and_logged_queries(method):
    pairs, log = related(60, 6, 4), related(30, 6, 4, seed=9)
    both = Pairs(old=np.concatenate([pairs.old, log.old]), new=np.concatenate([pairs.new, log.new]))
    for logged, every in ((None, pairs), (log, both)):
        fitted = fit(pairs, method=method, settings=TrainingSettings(), logged=logged, **COSINE)
        assert fitted.reverse.to_bytes() == first(method, every, COSINE).to_bytes()
        assert (fitted.head, fitted.lift) == (None, None)
    assert not METHODS[method].has_head
