"""Interrupt a script at random, start it again, and compare with an undisturbed run to the bit."""
