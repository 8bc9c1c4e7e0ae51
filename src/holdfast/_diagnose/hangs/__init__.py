"""From stacks and counters to the cause of a hang."""
