"""What loses a run before it has begun: in a batch script, and on a machine.

Of a batch script nothing is run: `shell` reads it as bash would, `launch` finds what each command
starts, the rules say what will happen, `fix` writes the corrected script. Where a script goes
beyond what is understood here, the rules stay silent: a false alarm would cost more than a miss.

Of a machine nothing is guessed: `doctor` measures and tries, and its judges say what that means.
"""
