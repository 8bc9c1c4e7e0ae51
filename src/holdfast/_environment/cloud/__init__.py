"""What a cloud says of the end of this machine, before it comes."""
