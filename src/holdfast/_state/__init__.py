"""From live objects to whole slots in shared memory."""
