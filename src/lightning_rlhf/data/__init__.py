"""Data pipeline: from files and Hub datasets to batches.

sources -> formats -> readers             rows of files to records; needs no model or tokenizer
chat -> lengths -> collate                rendering and tokenisation, truncation, padding
datamodule                                examples of batch k, and the start of a resumed run
problems                                  checks of preference pairs
tables, rollouts                          Parquet files that a run reads and writes
"""
