"""The pictures of the README, each made from something that really happened."""
