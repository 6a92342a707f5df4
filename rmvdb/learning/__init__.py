"""What is trained and applied: transforms, methods, losses, calibration and geometry. Choosing among them is planning."""
