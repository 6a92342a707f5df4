"""Networks and their losses: ψ and ρ, h, the bridges, calibration, hyperbolic geometry, training that keeps models compatible."""
