"""Sampling and scoring of responses."""
