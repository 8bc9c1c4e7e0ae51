"""What in a batch script loses the signal, the log or the job; nothing of it is run.

`shell` reads the script as bash would, `launch` finds what each command starts, the rules
say what will happen, `fix` writes the corrected script. Where a script goes beyond what
is understood here, the rules stay silent: a false alarm would cost more than a miss.
"""
