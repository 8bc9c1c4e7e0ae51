"""Live objects to a tree of JSON values and a list of tensors, and back."""
