"""Adapters that need no framework, and what the frameworks' adapters share."""
