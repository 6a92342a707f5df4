"""What an upgrade would do: sample, train, measure the curve, choose, count the cost. Changes nothing but its own cache."""
