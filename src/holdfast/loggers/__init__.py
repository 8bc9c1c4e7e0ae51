"""Loggers that follow a run back when it resumes."""
