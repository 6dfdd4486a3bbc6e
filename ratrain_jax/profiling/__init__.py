"""Measures what a step's programs, transfers and collectives take on the devices here, to simulate and plan with."""
