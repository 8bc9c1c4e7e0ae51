"""The bytes of a checkpoint: image, manifest, checksums, and the validation of all that is read."""
