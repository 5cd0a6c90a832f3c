"""Data: rows of files and Hub datasets, their tokens, and the batches of a stage."""
