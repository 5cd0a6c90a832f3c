"""Models: loading, scalar heads, roles that share one base model, and the `final/` folder."""
