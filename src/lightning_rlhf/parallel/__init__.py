"""Replicas: processes that hold the same weights and divide the rows of each batch."""
