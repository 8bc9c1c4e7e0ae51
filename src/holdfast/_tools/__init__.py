"""The commands of `holdfast`."""
