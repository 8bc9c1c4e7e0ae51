"""Keepers of several ranks: one of them, the hub, decides for all."""
