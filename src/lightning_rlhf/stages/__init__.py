"""Stages: what each reads, builds, checks before its first update, and fits."""
