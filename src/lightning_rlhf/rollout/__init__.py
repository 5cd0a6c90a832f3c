"""Generate responses and score them."""
