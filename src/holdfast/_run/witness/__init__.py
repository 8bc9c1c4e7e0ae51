"""The other side of a proof: sees what a script trains, from inside its process, and tells."""
