"""Data: from files and hub data sets to batches. A row passes

sources -> rows -> readers -> splits   text; no model or tokenizer is needed to check a file
chat -> lengths -> collate             tokens; each of these three does its one thing alone
schedule -> datamodule                 which examples batch k holds, and where a resumed run starts
"""
