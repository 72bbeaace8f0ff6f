"""What the model is, where it comes from, and what it computes."""
