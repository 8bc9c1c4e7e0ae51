"""A second place for checkpoints: a folder, a bucket, or whatever fsspec has an address for.

What is uploaded is cut into pieces that are named by their own checksum, and the manifest comes
last. So an upload that was cut goes on where it was, what two checkpoints share is there once,
and what has no manifest does not count. Only this room imports fsspec, and only in a process of
its own: neither trainer nor keeper ever waits for a network.
"""
