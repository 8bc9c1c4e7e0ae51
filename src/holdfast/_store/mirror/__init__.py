"""A second place for checkpoints: a folder, a bucket, or any address that fsspec knows.

Files are uploaded in chunks that are named by their checksum, and the manifest comes last. So an
upload that was cut continues, what two checkpoints share is stored once, and what has no manifest
does not count. Only this package imports fsspec, and only in a process of its own: neither trainer
nor keeper ever waits for a network.
"""
