"""The version, in a file that the build reads too."""

__version__ = "0.1.0"
