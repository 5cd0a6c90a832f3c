"""Figures, tables and reports for the people who read a run."""
