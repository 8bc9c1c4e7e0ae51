"""Forgotten: averaged weights, in a module of the project that the script only imports."""

from engine.training import run

if __name__ == "__main__":
    run()
