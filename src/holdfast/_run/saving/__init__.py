"""The trainer's side of keeping: what is copied when, ordered, and waited for."""
