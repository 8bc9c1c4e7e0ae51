"""The part of a proof that runs inside the user's script."""
