"""The bytes of a checkpoint: image, manifest, checksums, and the check of all that is read."""
