"""Transforms, methods, losses, calibration and geometry: how they are trained and applied. The choice among them is in
planning."""
