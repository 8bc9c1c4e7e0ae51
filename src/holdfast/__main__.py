"""`python -m holdfast`: the command line of this very interpreter's holdfast."""

from holdfast._tools.cli import main

if __name__ == "__main__":
    main()
