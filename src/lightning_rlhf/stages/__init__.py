"""Stages: what each reads, builds, fits and hands over, and the folder of its run."""
