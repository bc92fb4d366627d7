"""Workflows of models served over tiers of workers, from edge to cloud."""
