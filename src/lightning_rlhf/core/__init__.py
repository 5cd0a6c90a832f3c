"""Records and mathematics of RLHF. Knows torch and nothing above it."""
