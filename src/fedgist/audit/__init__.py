"""Attacks on what is released, and the figures that belong beside a claim."""
