"""From the newest good state back to live objects."""
