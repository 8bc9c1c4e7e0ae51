"""The ranks of one job: who they are, where they meet, and what they must agree on first."""
