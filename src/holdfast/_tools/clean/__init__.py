"""What `holdfast clean` finds and removes."""
