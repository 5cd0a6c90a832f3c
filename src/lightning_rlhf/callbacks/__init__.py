"""What is measured, shown and saved while a stage runs."""
