"""What a run leaves behind for people: figures and tables."""
