"""A step in simulation: where its time goes on hardware of which a few numbers are known. Arithmetic alone, no torch."""
