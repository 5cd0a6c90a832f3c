"""Models: loading, heads, the roles that share one base, and the folder a stage hands over."""
