"""Predict what an upgrade does: sample, train, measure the curve, choose, count the cost. Changes nothing but its own cache."""
